"""ONNX Runtime GenAI: one Generator per static batch (left-padded)."""

import os
import time

import common

a = common.args()
os.environ["OMP_NUM_THREADS"] = str(a.threads)


def main():
    t = time.time()
    import numpy as np
    import onnxruntime_genai as og

    import_s = time.time() - t
    cfg = og.Config(a.model)
    if hasattr(cfg, "overlay"):
        cfg.overlay('{"model": {"decoder": {"session_options": {"intra_op_num_threads": %d}}}}' % a.threads)
    model = og.Model(cfg)

    def serve(load):
        requests = load["requests"]
        times = [[] for _ in requests]
        t0 = time.time()
        for s in range(0, len(requests), load["max_seqs"]):
            group = requests[s : s + load["max_seqs"]]
            width, new = max(len(r["prompt"]) for r in group), max(r["new"] for r in group)
            p = og.GeneratorParams(model)
            p.set_search_options(batch_size=len(group), do_sample=False, max_length=width + new, min_length=width + new)
            g = og.Generator(model, p)
            g.append_tokens(np.array([[2] * (width - len(r["prompt"])) + r["prompt"] for r in group], dtype=np.int32))
            for n in range(new):
                g.generate_next_token()
                now = time.time()
                for k, r in enumerate(group):
                    if n < r["new"]:
                        times[s + k].append(now)
            del g
        return t0, times

    common.run("ort-genai", a, serve, import_s)


if __name__ == "__main__":
    main()
