"""CTranslate2: static batches, each padded to its longest (no continuous batching, no paging)."""

import json
import os
import time

import common

a = common.args()


def main():
    t = time.time()
    import ctranslate2 as ct

    import_s = time.time() - t
    gen = ct.Generator(
        a.model,
        "cpu",
        compute_type={"fp32": "float32"}.get(a.precision, a.precision),
        intra_threads=a.threads,
        inter_threads=1,
    )
    names = json.load(open(os.path.join(a.model, "vocabulary.json")))

    def serve(load):
        requests = load["requests"]
        shared = 0
        if load["prefix_cache"]:
            shared = next(
                n for n, c in enumerate(zip(*(r["prompt"] for r in requests), strict=False)) if len(set(c)) > 1
            )
        times = [[] for _ in requests]
        prompts = [[names[k] for k in r["prompt"]] for r in requests]
        t0 = time.time()
        for s in range(0, len(requests), load["max_seqs"]):
            group = range(s, min(s + load["max_seqs"], len(requests)))
            new = max(requests[i]["new"] for i in group)

            def seen(step):
                i = s + step.batch_id
                if len(times[i]) < requests[i]["new"]:
                    times[i].append(time.time())
                return False

            gen.generate_batch(
                [prompts[i][shared:] for i in group],
                max_length=new,
                min_length=new,
                beam_size=1,
                end_token=[2],
                include_prompt_in_result=False,
                callback=seen,
                static_prompt=prompts[0][:shared] if shared else None,
            )
        return t0, times

    common.run("ctranslate2", a, serve, import_s)


if __name__ == "__main__":
    main()
