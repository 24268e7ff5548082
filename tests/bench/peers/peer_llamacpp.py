"""llama.cpp through its C API (llama-cpp-python): continuous batching over parallel sequences.

A small scheduler: every step takes one token of each running sequence and fills the batch with
prompt pieces of the waiting ones. With a shared-prefix workload, the prefix that all prompts
have in common is computed once in sequence 0's cells and copied (by reference) to the rest.
"""

import ctypes
import time

import common

a = common.args(unified=-1, flash=1, batch=512)  # unified -1: one shared KV pool only where prefixes are shared


def common_prefix(prompts):
    first = prompts[0]
    for n, column in enumerate(zip(*prompts, strict=False)):
        if len(set(column)) > 1:
            return n
    return min(len(first), *map(len, prompts)) - 1


def main():
    t = time.time()
    import llama_cpp as lc
    import numpy as np

    import_s = time.time() - t
    lc.llama_backend_init()
    quiet = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(quiet, ctypes.c_void_p(0))
    mp = lc.llama_model_default_params()
    model = lc.llama_model_load_from_file(a.model.encode(), mp)
    n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))

    def make_context(load):
        cp = lc.llama_context_default_params()
        seqs = min(load["max_seqs"], len(load["requests"]))
        lens = sorted((len(r["prompt"]) + r["new"] for r in load["requests"]), reverse=True)
        unified = load["prefix_cache"] if a.unified < 0 else bool(a.unified)
        cells = sum(lens[:seqs]) if unified else seqs * lens[0]
        cp.n_ctx = (cells + 255) // 256 * 256
        cp.n_batch = cp.n_ubatch = a.batch
        cp.n_seq_max = seqs + (1 if load["prefix_cache"] else 0)
        cp.n_threads = cp.n_threads_batch = a.threads
        cp.kv_unified = unified
        cp.flash_attn_type = 1 if a.flash else 0
        cp.no_perf = True
        if hasattr(cp, "n_outputs_max"):
            cp.n_outputs_max = 0
        return lc.llama_init_from_model(model, cp), seqs

    def serve(load):
        ctx, n_slots = make_context(load)
        assert ctx, "no context"
        mem = lc.llama_get_memory(ctx)
        batch = lc.llama_batch_init(a.batch, 0, 1)
        requests = load["requests"]
        times = [[] for _ in requests]
        t0 = time.time()

        def put(n, token, pos, seq, logits):
            batch.token[n], batch.pos[n], batch.n_seq_id[n] = token, pos, 1
            batch.seq_id[n][0], batch.logits[n] = seq, logits

        def decode(n):
            batch.n_tokens = n
            rc = lc.llama_decode(ctx, batch)
            assert rc == 0, f"llama_decode: {rc}"

        shared, prefix_seq = 0, n_slots
        if load["prefix_cache"]:
            shared = common_prefix([r["prompt"] for r in requests])
            prefix = requests[0]["prompt"][:shared]
            for s in range(0, shared, a.batch):
                piece = prefix[s : s + a.batch]
                for n, token in enumerate(piece):
                    put(n, token, s + n, prefix_seq, 0)
                decode(len(piece))
        waiting, free, running = list(range(len(requests)))[::-1], list(range(n_slots))[::-1], {}
        while waiting or running:
            while waiting and free:
                slot, i = free.pop(), waiting.pop()
                if shared:
                    lc.llama_memory_seq_cp(mem, prefix_seq, slot, 0, -1)
                running[slot] = {"i": i, "done": shared, "next": None}
            n, outs = 0, []
            for slot, s in running.items():
                if s["next"] is not None:
                    put(n, s["next"], s["done"], slot, 1)
                    outs.append((n, slot))
                    s["done"] += 1
                    n += 1
            for slot, s in running.items():
                prompt = requests[s["i"]]["prompt"]
                if s["next"] is None and n < a.batch:
                    take = min(a.batch - n, len(prompt) - s["done"])
                    for k in range(take):
                        last = s["done"] + k == len(prompt) - 1
                        put(n, prompt[s["done"] + k], s["done"] + k, slot, 1 if last else 0)
                        if last:
                            outs.append((n, slot))
                        n += 1
                    s["done"] += take
            decode(n)
            picks = [
                (slot, int(np.ctypeslib.as_array(lc.llama_get_logits_ith(ctx, k), (n_vocab,)).argmax()))
                for k, slot in outs
            ]
            now = time.time()
            for slot, token in picks:
                s = running[slot]
                times[s["i"]].append(now)
                s["next"] = token
                if len(times[s["i"]]) == requests[s["i"]]["new"]:
                    lc.llama_memory_seq_rm(mem, slot, -1, -1)
                    del running[slot]
                    free.append(slot)
        lc.llama_batch_free(batch)
        lc.llama_free(ctx)
        return t0, times

    common.run("llama.cpp", a, serve, import_s)


if __name__ == "__main__":
    main()
