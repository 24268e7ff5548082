"""Calls of every op that no mutant minds: what comes out of them must be the reference's, bit for bit.

Off every trigger at once: no window, no sinks, contexts of one split, whole tiles, nothing strided, nothing to be
masked, no ties. Where a fault sits in the ordinary call itself, a second call stands beside the plain one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import (
    AttentionMetadata,
    KVCache,
    KVCacheSpec,
    QuantFormat,
    QuantizedTensor,
    QuantScheme,
    ReferenceOps,
    SingleRank,
    StepPlan,
    WeightSpec,
)

Benign = Callable[[ReferenceOps], list[torch.Tensor]]
"""Calls an op of the given ops and returns everything that it wrote."""

BLOCK = 16
ROWS = (20, 1)
KEYS = (20, 30)
"""A prefill without context, and a decode."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def cache(value_dim: int = 64, key_dim: int = 64, kv_heads: int = 2) -> KVCache:
    spec = KVCacheSpec(kv_heads, key_dim, value_dim, torch.float32, BLOCK)
    host = HostBackend()
    pool = host.allocate_kv_pool(9, spec.block_bytes)
    pool.storage.view(torch.float32).copy_(normal(pool.storage.numel() // 4))
    return host.kv_view(pool, spec)


def plan() -> StepPlan:
    starts = torch.tensor([0, *itertools.accumulate(ROWS)], dtype=torch.int32)
    table = torch.tensor([[3, 7, 0, 5], [1, 8, 2, 0]], dtype=torch.int32)
    slots = torch.arange(sum(ROWS))
    return StepPlan(
        AttentionMetadata(
            2, sum(ROWS), max(ROWS), max(KEYS), starts, torch.tensor(KEYS, dtype=torch.int32), table, slots, BLOCK
        )
    )


def weight(ops: ReferenceOps, rows: int, columns: int) -> Any:
    packed = ops.prepare_weight(WeightSpec(rows, columns, torch.float32))
    packed.place(normal(rows, columns), 0)
    return packed


def paged(ops: ReferenceOps, window: int | None = None, *, has_lse: bool = True) -> list[torch.Tensor]:
    out, lse = torch.zeros(sum(ROWS), 4, 64), torch.zeros(sum(ROWS), 4)
    q = normal(sum(ROWS), 4, 64)
    ops.paged_attention(q, cache(), plan(), out=out, lse=lse if has_lse else None, softmax_scale=0.125, window=window)
    return [out, lse] if has_lse else [out]


def contiguous(ops: ReferenceOps) -> list[torch.Tensor]:
    out, starts = torch.zeros(20, 4, 64), torch.tensor([0, 20], dtype=torch.int32)
    q, k, v = normal(20, 4, 64), normal(20, 2, 64), normal(20, 2, 64)
    ops.attention(q, k, v, starts, starts, out=out, softmax_scale=0.125)
    return [out]


def mla(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(sum(ROWS), 16, 64)
    q, rope = normal(sum(ROWS), 16, 64), normal(sum(ROWS), 16, 32)
    ops.mla_attention(q, rope, cache(0, 96, 1), plan(), out=out, softmax_scale=0.1)
    return [out]


def write(ops: ReferenceOps) -> list[torch.Tensor]:
    kv = cache()
    ops.write_kv(normal(21, 2, 64), normal(21, 2, 64), kv, torch.arange(21) + 5)
    return [kv.storage]


def rope_write(ops: ReferenceOps) -> list[torch.Tensor]:
    kv, out_q = cache(), torch.zeros(21, 4, 64)
    rows = (normal(21, 4, 64), normal(21, 2, 64), normal(21, 2, 64))
    ops.rope_write_kv(*rows, torch.arange(21), normal(30, 64), kv, torch.arange(21) + 5, out_q=out_q)
    return [kv.storage, out_q]


def write_mla(ops: ReferenceOps) -> list[torch.Tensor]:
    kv = cache(0, 96, 1)
    ops.write_mla(normal(21, 64), normal(21, 32), kv, torch.arange(21) + 5)
    return [kv.storage]


def copy(ops: ReferenceOps) -> list[torch.Tensor]:
    kv = cache()
    ops.copy_blocks(kv, torch.tensor([[1, 4], [5, 6]]))
    return [kv.storage]


def gather(ops: ReferenceOps) -> list[torch.Tensor]:
    out_k, out_v = torch.zeros(2, BLOCK, 2, 64), torch.zeros(2, BLOCK, 2, 64)
    ops.gather_blocks(cache(), torch.tensor([5, 2]), out_k=out_k, out_v=out_v)
    return [out_k, out_v]


def scatter(ops: ReferenceOps) -> list[torch.Tensor]:
    kv = cache()
    ops.scatter_blocks(kv, torch.tensor([5, 2]), normal(2, BLOCK, 2, 64), normal(2, BLOCK, 2, 64))
    return [kv.storage]


def gemm(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(8, 24)
    ops.gemm(normal(8, 64), weight(ops, 24, 64), out=out)
    return [out]


def grouped(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(24, 16)
    segments = torch.tensor([0, 8, 24], dtype=torch.int32)
    ops.grouped_gemm(normal(24, 32), [weight(ops, 16, 32), weight(ops, 16, 32)], segments, out=out)
    return [out]


def quantised_weight(ops: ReferenceOps) -> list[torch.Tensor]:
    scheme = QuantScheme(QuantFormat.INT4, 64, symmetric=False)
    codes = (torch.arange(8 * 128).view(8, 128) % 16).to(torch.int8)
    part = QuantizedTensor(scheme, codes, normal(8, 2).abs(), torch.arange(1, 17).view(8, 2).clamp(max=15))
    packed = ops.prepare_weight(WeightSpec(8, 128, torch.float32, scheme))
    packed.place(part, 0)
    return [packed.dense()]


def lora(ops: ReferenceOps) -> list[torch.Tensor]:
    out = normal(5, 24)
    a, b = normal(2, 16, 32), normal(2, 24, 16)
    ops.lora_gemm(normal(5, 32), a, b, torch.tensor([0.5, 2.0]), torch.tensor([0, 1, 1, 0, 1]), out=out)
    return [out]


def quantize(ops: ReferenceOps) -> list[torch.Tensor]:
    """Rows whose codes are whole numbers already."""
    x = (normal(5, 32) * 40).round().clamp(-127, 127)
    x[:, 0] = 127
    out, scales = torch.zeros(5, 32, dtype=torch.int8), torch.zeros(5, 1)
    ops.quantize(x, QuantScheme(QuantFormat.INT8), out=out, scales=scales)
    return [out, scales]


def embed(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(3, 32)
    ops.embed(torch.tensor([0, 6, 3]), weight(ops, 8, 32), out=out)
    return [out]


def rms_norm(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(5, 576)
    ops.rms_norm(normal(5, 576), normal(576), out=out, eps=1e-5)
    return [out]


def rotary(ops: ReferenceOps) -> list[torch.Tensor]:
    out_q, out_k = torch.zeros(5, 4, 64), torch.zeros(5, 2, 64)
    ops.rotary(normal(5, 4, 64), normal(5, 2, 64), torch.arange(5), normal(9, 64), out_q=out_q, out_k=out_k)
    return [out_q, out_k]


def act_mul(ops: ReferenceOps) -> list[torch.Tensor]:
    """Gate and up are equal."""
    out = torch.zeros(5, 24)
    ops.act_mul(normal(5, 24).repeat(1, 2), out=out, gate="silu")
    return [out]


def layer_norm(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(5, 576)
    ops.layer_norm(normal(5, 576), normal(576), out=out, eps=1e-5)
    return [out]


def activation(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(5, 24)
    ops.activation(normal(5, 24), out=out, kind="silu")
    return [out]


def permute(ops: ReferenceOps) -> list[torch.Tensor]:
    """Every expert is here, and each has its pairs in a row."""
    ids = torch.arange(10).view(5, 2)
    rows, places, start = torch.zeros(10, dtype=torch.int64), torch.zeros_like(ids), torch.zeros(11, dtype=torch.int32)
    ops.moe_permute(ids, first_expert=0, out_rows=rows, out_places=places, segment_start=start)
    return [rows, places, start]


def combine(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(5, 24)
    ops.moe_combine(normal(10, 24), torch.arange(10).view(5, 2), normal(5, 2).abs(), out=out)
    return [out]


def merge(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(5, 4, 64)
    ops.merge_attention(normal(5, 4, 64), normal(5, 4), normal(5, 4, 64), normal(5, 4), out=out)
    return [out]


def route(ops: ReferenceOps) -> list[torch.Tensor]:
    weights, ids = torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.int32)
    ops.moe_route(normal(5, 8), top_k=2, out_weights=weights, out_ids=ids)
    return [weights, ids]


def all_reduce(ops: ReferenceOps) -> list[torch.Tensor]:
    out, residual = torch.zeros(5, 64), normal(5, 64)
    ops.all_reduce_norm(normal(5, 64), SingleRank(), normal(64), out=out, residual=residual, eps=1e-5)
    return [out, residual]


def sample(ops: ReferenceOps) -> list[torch.Tensor]:
    out = torch.zeros(6, dtype=torch.int64)
    temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 1.0])
    ones, zeros = torch.ones(6), torch.zeros(6)
    ops.sample(normal(6, 50), temperature, torch.full((6,), 9), ones, zeros, torch.linspace(0, 0.9, 6), out=out)
    return [out]


PLAIN: dict[str, Benign] = {
    "paged_attention": paged,
    "attention": contiguous,
    "merge_attention": merge,
    "mla_attention": mla,
    "write_kv": write,
    "rope_write_kv": rope_write,
    "write_mla": write_mla,
    "copy_blocks": copy,
    "gather_blocks": gather,
    "scatter_blocks": scatter,
    "gemm": gemm,
    "grouped_gemm": grouped,
    "prepare_weight": quantised_weight,
    "lora_gemm": lora,
    "quantize": quantize,
    "embed": embed,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rotary": rotary,
    "act_mul": act_mul,
    "activation": activation,
    "moe_route": route,
    "moe_permute": permute,
    "moe_combine": combine,
    "all_reduce_norm": all_reduce,
    "sample": sample,
}
"""By op."""

INSTEAD: dict[str, Benign] = {
    "window-minus-one-literal": lambda ops: paged(ops, window=7),
    "lse-base-2": lambda ops: paged(ops, has_lse=False),
}
"""By mutant: the plain call is what sets the fault off."""
