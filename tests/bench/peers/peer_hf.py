"""HF transformers: generate() on padded static batches (mode static) or its continuous batching (mode cb)."""

import os
import time

import common

a = common.args(mode="static", attn="sdpa")
os.environ.update({"OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"})


def main():
    t = time.time()
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    import_s = time.time() - t
    torch.set_num_threads(a.threads)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[a.precision]
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=dtype, attn_implementation=a.attn).eval()
    model.generation_config = GenerationConfig(
        do_sample=False, pad_token_id=2, eos_token_id=None if a.mode == "static" else -1
    )

    class Times:
        """A streamer that only notes when tokens arrive (batch of any size)."""

        def __init__(self):
            self.at = []

        def put(self, value):
            self.at.append(time.time())

        def end(self):
            pass

    def static(load):
        requests = load["requests"]
        times = [[] for _ in requests]
        t0 = time.time()
        for s in range(0, len(requests), load["max_seqs"]):
            group = requests[s : s + load["max_seqs"]]
            width = max(len(r["prompt"]) for r in group)
            x = torch.full((len(group), width), 2)
            mask = torch.zeros_like(x)
            for k, r in enumerate(group):
                x[k, width - len(r["prompt"]) :] = torch.tensor(r["prompt"])
                mask[k, width - len(r["prompt"]) :] = 1
            clock = Times()
            with torch.inference_mode():
                model.generate(
                    x,
                    attention_mask=mask,
                    max_new_tokens=max(r["new"] for r in group),
                    generation_config=model.generation_config,
                    streamer=clock if len(group) == 1 else None,
                )
            now = time.time()
            for k, r in enumerate(group):
                times[s + k] = clock.at[1:] if len(group) == 1 else [now] * r["new"]
        return t0, times

    def continuous(load):
        from transformers import ContinuousBatchingConfig

        requests = load["requests"]
        times = [[] for _ in requests]
        cfg = ContinuousBatchingConfig(
            page_size=32,
            num_blocks=640,
            max_batch_tokens=512,
            allow_block_sharing=True,
            max_requests_per_batch=load["max_seqs"],
        )
        manager = model.init_continuous_batching(
            generation_config=model.generation_config, continuous_batching_config=cfg
        )
        t0 = time.time()
        names = {}
        for i, r in enumerate(requests):
            names[manager.add_request(r["prompt"], max_new_tokens=r["new"], streaming=True)] = i
        manager.start()
        left = len(requests)
        while left:
            out = manager.get_result(timeout=60)
            if out is None:
                raise RuntimeError("continuous batching stalled or failed")
            now, i = time.time(), names[out.request_id]
            times[i].extend([now] * (len(out.generated_tokens) - len(times[i])))
            left -= out.is_finished()
        manager.stop(block=True)
        return t0, times

    common.run("hf-" + a.mode, a, static if a.mode == "static" else continuous, import_s)


if __name__ == "__main__":
    main()
