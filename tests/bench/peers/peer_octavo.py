"""Octavo: the engine in this process, stepped by hand so that token times are seen. Token ids only, no text."""

import time

import common

a = common.args(backend="auto")


def main():
    t = time.time()
    from octavo import EngineConfig, SamplingParams
    from octavo.core.engine.engine import Engine
    from octavo.core.engine.wire import EngineRequest
    from octavo.core.load.checkpoint import open_checkpoint
    from octavo.core.load.resolve import resolve_model

    import_s = time.time() - t
    config = EngineConfig(
        model=a.model,
        backend=a.backend,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[a.precision],
        num_threads=a.threads,
        max_model_len=common.CEILING_LEN,
        max_num_seqs=max(w["max_seqs"] for w in a.loads),
        kv_cache_memory_bytes=2 << 30,
        progress=False,
    )
    engine = Engine.from_checkpoint(config, open_checkpoint(resolve_model(a.model)))

    def serve(load):
        engine.reset_prefix_cache()
        requests = load["requests"]
        times = [[] for _ in requests]
        t0 = time.time()
        for i, r in enumerate(requests):
            params = SamplingParams(temperature=0.0, max_tokens=r["new"], ignore_eos=True)
            engine.add_request(EngineRequest(request_id=str(i), prompt_token_ids=r["prompt"], params=params))
        while engine.has_work():
            outputs = engine.step()
            now = time.time()
            for output in outputs:
                times[int(output.request_id)].extend([now] * len(output.token_ids))
        return t0, times

    common.run("octavo", a, serve, import_s)
    engine.close()


if __name__ == "__main__":
    main()
