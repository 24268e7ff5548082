"""How near the CPU's attention comes to the machine's limits, beside torch's own kernel, interleaved.

    PYTHONPATH=src python tests/bench/bench_attention.py [--threads N] [--isa NAME] [--repeats N]

Decode is measured in bytes of KV read per second against what a plain read of as much memory reaches; prefill in
floating-point operations per second (4 D per visible key, query and head) against torch's scaled_dot_product_attention
over contiguous keys, which needs no block table. Best of the repeats: the machine is shared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.backends.cpu import native
from octavo.backends.cpu.attention import AttentionOps
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVCacheSpec, KVLayout

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One batch: equal requests of `context` keys, the last `queries` of them with a query."""

    requests: int
    context: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def kv_bytes(self) -> int:
        return self.requests * self.context * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        visible = sum(range(self.context - self.queries + 1, self.context + 1))
        return 4 * self.head_dim * self.heads * self.requests * visible

    def __str__(self) -> str:
        return (
            f"B={self.requests:3} L={self.context:5} q={self.queries:4} H={self.heads}/{self.kv_heads} "
            f"D={self.head_dim:3} {str(self.dtype).removeprefix('torch.')}"
        )


DECODE = [
    Case(1, 16384, 1, 9, 3, 64, torch.float32),
    Case(1, 16384, 1, 9, 3, 64, torch.bfloat16),
    Case(1, 16384, 1, 32, 8, 128, torch.float32),
    Case(1, 16384, 1, 32, 8, 128, torch.bfloat16),
    Case(32, 1024, 1, 9, 3, 64, torch.float32),
    Case(32, 1024, 1, 32, 8, 128, torch.float32),
    Case(32, 1024, 1, 8, 8, 64, torch.float32),
    Case(32, 300, 1, 4, 1, 256, torch.float32),
]
PREFILL = [
    Case(1, 2048, 2048, 9, 3, 64, torch.float32),
    Case(1, 2048, 2048, 9, 3, 64, torch.bfloat16),
    Case(1, 2048, 2048, 8, 8, 64, torch.float32),
    Case(1, 2048, 2048, 32, 8, 128, torch.float32),
    Case(1, 1024, 1024, 4, 1, 256, torch.float32),
    Case(8, 256, 256, 9, 3, 64, torch.float32),
    Case(1, 4096, 64, 9, 3, 64, torch.float32),
]


def own_kernel(ops: AttentionOps, case: Case) -> Callable[[], None]:
    """A call of the paged kernel over shuffled blocks."""
    blocks = -(-case.context // BLOCK_SIZE)
    num_blocks = case.requests * blocks
    shape = (num_blocks, case.kv_heads, BLOCK_SIZE, case.head_dim)
    key, value = (torch.randn(shape, dtype=torch.float32).to(case.dtype).transpose(1, 2) for _ in range(2))
    spec = KVCacheSpec(case.kv_heads, case.head_dim, case.head_dim, case.dtype, BLOCK_SIZE)
    kv = KVCache(spec, KVLayout.HND, num_blocks, key, value)
    tokens = case.requests * case.queries
    meta = AttentionMetadata(
        num_requests=case.requests,
        num_tokens=tokens,
        max_query_len=case.queries,
        max_seq_len=case.context,
        query_start_loc=torch.arange(0, tokens + 1, case.queries, dtype=torch.int32),
        seq_lens=torch.full((case.requests,), case.context, dtype=torch.int32),
        block_table=torch.randperm(num_blocks).to(torch.int32).view(case.requests, blocks),
        slot_mapping=torch.full((tokens,), -1),
        block_size=BLOCK_SIZE,
    )
    q, out = (torch.randn(tokens, case.heads, case.head_dim) for _ in range(2))
    plan, scale = ops.plan(meta), case.head_dim**-0.5
    return lambda: ops.paged_attention(q, kv, plan, out=out, softmax_scale=scale)


def torch_kernel(case: Case) -> Callable[[], object]:
    """torch's attention over contiguous fp32 keys, heads repeated beforehand."""
    q = torch.randn(case.requests, case.heads, case.queries, case.head_dim)
    k, v = (torch.randn(case.requests, case.heads, case.context, case.head_dim) for _ in range(2))
    if case.queries == case.context:
        return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
    mask = torch.ones(case.queries, case.context, dtype=torch.bool).tril(case.context - case.queries)
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask)


def memory_read(num_bytes: int) -> Callable[[], object]:
    """A read of as many bytes, by torch's sum over all threads."""
    x = torch.ones(num_bytes // 4)
    return lambda: x.sum()


def best_seconds(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """The shortest time of each call, taken in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(repeats):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=native.ISAS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", choices=("decode", "prefill"))
    options = parser.parse_args()
    library = native.load()
    if library is None:
        raise SystemExit("no native library: nothing to measure")
    context = native.NativeContext(library, options.threads, options.isa)
    ops = AttentionOps(context)
    torch.set_num_threads(options.threads)
    print(f"{context.isa}, {options.threads} threads")
    for case in DECODE if options.only != "prefill" else []:
        own, read = best_seconds([own_kernel(ops, case), memory_read(case.kv_bytes)], options.repeats)
        own_rate, read_rate = (case.kv_bytes / 1e9 / seconds for seconds in (own, read))
        print(f"decode  {case}: {own_rate:6.1f} GB/s, plain read {read_rate:6.1f}, ratio {own_rate / read_rate:.2f}")
    for case in PREFILL if options.only != "decode" else []:
        own, other = best_seconds([own_kernel(ops, case), torch_kernel(case)], options.repeats)
        own_rate, other_rate = (case.flops / 1e9 / seconds for seconds in (own, other))
        print(f"prefill {case}: {own_rate:6.1f} GFLOP/s, torch {other_rate:6.1f}, ratio {own_rate / other_rate:.2f}")


if __name__ == "__main__":
    main()
