"""vLLM (CPU): offline engine in this process, stepped by hand so that token times are seen."""

import os
import time

import common

a = common.args(eager=0, extra="")
os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "0-%d" % (a.threads - 1),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
)


def main():
    t = time.time()
    from vllm import LLM, SamplingParams

    import_s = time.time() - t
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[a.precision]
    llm = LLM(
        a.model,
        dtype=dtype,
        max_model_len=common.CEILING_LEN,
        max_num_seqs=max(w["max_seqs"] for w in a.loads),
        enforce_eager=bool(a.eager),
        enable_prefix_caching=True,
        seed=0,
    )
    engine, tag = llm.llm_engine, [0]

    def serve(load):
        llm.reset_prefix_cache()
        tag[0] += 1
        ids = {f"{tag[0]}-{i}": i for i in range(len(load["requests"]))}
        times = [[] for _ in ids]
        t0 = time.time()
        for rid, i in ids.items():
            r = load["requests"][i]
            engine.add_request(
                rid,
                {"prompt_token_ids": r["prompt"]},
                SamplingParams(temperature=0, max_tokens=r["new"], ignore_eos=True, detokenize=False),
            )
        while engine.has_unfinished_requests():
            outs = engine.step()
            now = time.time()
            for o in outs:
                key = o.request_id if o.request_id in ids else o.request_id.rsplit("-", 1)[0]
                seen = times[ids[key]]
                seen.extend([now] * (len(o.outputs[0].token_ids) - len(seen)))
        return t0, times

    common.run("vllm", a, serve, import_s)


if __name__ == "__main__":
    main()
