"""OpenVINO GenAI: ContinuousBatchingPipeline (PagedAttention on CPU), stepped by hand."""

import time

import common

a = common.args(kv="")


def main():
    t = time.time()
    import numpy as np
    import openvino as ov
    import openvino_genai as og

    import_s = time.time() - t
    sc = og.SchedulerConfig()
    sc.cache_size = 2
    sc.max_num_seqs = max(w["max_seqs"] for w in a.loads)
    sc.max_num_batched_tokens = 2048
    sc.dynamic_split_fuse = True
    sc.enable_prefix_caching = any(w["prefix_cache"] for w in a.loads)
    props = {"INFERENCE_NUM_THREADS": a.threads}
    if a.precision == "bf16":
        props["INFERENCE_PRECISION_HINT"] = "bf16"
    if a.kv:
        props["KV_CACHE_PRECISION"] = a.kv
    pipe = og.ContinuousBatchingPipeline(a.model, sc, "CPU", props)
    tag = [0]

    def serve(load):
        requests = load["requests"]
        times, _counts = [[] for _ in requests], [0] * len(requests)
        base = tag[0]
        tag[0] += len(requests)
        t0 = time.time()
        handles = []
        for i, r in enumerate(requests):
            g = og.GenerationConfig()
            g.max_new_tokens, g.ignore_eos, g.do_sample = r["new"], True, False
            handles.append(pipe.add_request(base + i, ov.Tensor(np.array([r["prompt"]], dtype=np.int64)), g))
        while pipe.has_non_finished_requests():
            pipe.step()
            now = time.time()
            for i, h in enumerate(handles):
                if h.can_read():
                    for out in h.read().values():
                        times[i].extend([now] * len(out.generated_ids))
        return t0, times

    common.run("openvino", a, serve, import_s)


if __name__ == "__main__":
    main()
