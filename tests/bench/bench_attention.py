"""How near the CPU's attention comes to the machine's limits, beside torch's own kernel, interleaved.

    PYTHONPATH=src python tests/bench/bench_attention.py [--threads N] [--isa NAME] [--layout HDN|HND] [--repeats N]

Decode is measured in bytes of KV read per second against what a plain read of as much memory reaches; prefill in
floating-point operations per second (4 D per visible key, query and head) against torch's scaled_dot_product_attention
over contiguous keys, which needs no block table. Best of the repeats: the machine is shared.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from octavo.backends.cpu import native
from octavo.backends.cpu.attention import AttentionOps
from octavo.backends.cpu.memory import reserve
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One batch: requests of `context` keys, the last `queries` of them with a query.

    Attributes:
        shortest: contexts lie evenly between it and `context`; 0 makes all equal.
        shared: leading tokens whose blocks belong to all requests.
        layers: caches that the calls use in turn, so that keys come from memory instead of a cache that kept them.
    """

    requests: int
    context: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    shortest: int = 0
    shared: int = 0
    layers: int = 1

    @property
    def contexts(self) -> list[int]:
        first = self.shortest or self.context
        return torch.linspace(first, self.context, self.requests).round().int().tolist()

    @property
    def kv_bytes(self) -> int:
        return sum(self.contexts) * self.kv_heads * 2 * self.head_dim * self.dtype.itemsize

    @property
    def flops(self) -> int:
        visible = sum(sum(range(length - self.queries + 1, length + 1)) for length in self.contexts)
        return 4 * self.head_dim * self.heads * visible

    def __str__(self) -> str:
        return (
            f"B={self.requests:3} L={self.context:5} q={self.queries:4} H={self.heads}/{self.kv_heads} "
            f"D={self.head_dim:3} {str(self.dtype).removeprefix('torch.')}"
            f"{f' from {self.shortest}' if self.shortest else ''}{f' shared {self.shared}' if self.shared else ''}"
        )


DECODE = [
    Case(32, 380, 1, 9, 3, 64, torch.float32, shortest=64, layers=12),
    Case(32, 380, 1, 9, 3, 64, torch.bfloat16, shortest=64, layers=12),
    Case(32, 560, 1, 9, 3, 64, torch.float32, shared=512, layers=12),
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
    Case(1, 512, 512, 9, 3, 64, torch.float32),
    Case(1, 4096, 64, 9, 3, 64, torch.float32),
]


def random_cache(case: Case, num_blocks: int, layout: KVLayout) -> KVCache:
    spec = KVCacheSpec(case.kv_heads, case.head_dim, case.head_dim, case.dtype, BLOCK_SIZE)
    storage = reserve(num_blocks * spec.block_bytes)
    storage.view(case.dtype).normal_()
    return torch_kv_view(KVPool(num_blocks, spec.block_bytes, storage), spec, layout)


def block_table(case: Case) -> torch.Tensor:
    """Shuffled blocks; the shared ones first in every row."""
    blocks, shared = -(-case.context // BLOCK_SIZE), case.shared // BLOCK_SIZE
    own = case.requests * (blocks - shared)
    ids = torch.randperm(own + shared).to(torch.int32)
    return torch.cat([ids[own:].expand(case.requests, -1), ids[:own].view(case.requests, -1)], dim=1)


def own_kernel(ops: AttentionOps, case: Case, layout: KVLayout) -> Callable[[], None]:
    """A call of the paged kernel, over the next layer's cache each time."""
    table = block_table(case)
    caches = itertools.cycle([random_cache(case, int(table.max()) + 1, layout) for _ in range(case.layers)])
    tokens = case.requests * case.queries
    meta = AttentionMetadata(
        num_requests=case.requests,
        num_tokens=tokens,
        max_query_len=case.queries,
        max_seq_len=case.context,
        query_start_loc=torch.arange(0, tokens + 1, case.queries, dtype=torch.int32),
        seq_lens=torch.tensor(case.contexts, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((tokens,), -1),
        block_size=BLOCK_SIZE,
    )
    q, out = (torch.randn(tokens, case.heads, case.head_dim) for _ in range(2))
    plan, scale = ops.plan(meta), case.head_dim**-0.5
    return lambda: ops.paged_attention(q, next(caches), plan, out=out, softmax_scale=scale)


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
    parser.add_argument("--layout", type=KVLayout, choices=[KVLayout.HND, KVLayout.HDN], default=KVLayout.HDN)
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
        own, read = best_seconds([own_kernel(ops, case, options.layout), memory_read(case.kv_bytes)], options.repeats)
        own_rate, read_rate = (case.kv_bytes / 1e9 / seconds for seconds in (own, read))
        print(f"decode  {case}: {own_rate:6.1f} GB/s, plain read {read_rate:6.1f}, ratio {own_rate / read_rate:.2f}")
    for case in PREFILL if options.only != "decode" else []:
        own, other = best_seconds([own_kernel(ops, case, options.layout), torch_kernel(case)], options.repeats)
        own_rate, other_rate = (case.flops / 1e9 / seconds for seconds in (own, other))
        print(f"prefill {case}: {own_rate:6.1f} GFLOP/s, torch {other_rate:6.1f}, ratio {own_rate / other_rate:.2f}")


if __name__ == "__main__":
    main()
