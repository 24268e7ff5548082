"""The cache kernels of GPUs against the reference: bytes at their slots, and nothing anywhere else."""

from __future__ import annotations

import itertools

import pytest
import torch

from octavo.backends.common.cache import FP8_DTYPES, CacheOps
from octavo.backends.common.gpu import Gpu
from octavo.core.backend.kv import KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import CacheSpec

NUM_BLOCKS = 8
SHAPES = [
    (KVCacheSpec(2, 64, 64, torch.float32, 16), KVLayout.NHD),
    (KVCacheSpec(3, 80, 48, torch.float32, 8), KVLayout.HND),
    (KVCacheSpec(5, 1, 3, torch.float32, 1), KVLayout.NHD),
]
PAIRS = {
    "pairs": [(1, 4), (2, 5)],
    "chain": [(1, 2), (2, 3), (3, 6)],
    "swap": [(0, 7), (1, 0), (7, 1), (2, 2), (6, 5), (0, 4), (4, 3)],
    "last-wins": [(0, 4), (1, 4), (4, 2)],
    "none": [],
}


def two_caches(spec: KVCacheSpec, layout: KVLayout) -> tuple[KVCache, KVCache]:
    """The same random bytes twice, with a gap behind each block."""
    block_bytes = spec.block_bytes + 48
    storage = torch.randint(0, 256, (NUM_BLOCKS * block_bytes,), dtype=torch.uint8)
    first, second = (
        torch_kv_view(KVPool(NUM_BLOCKS, block_bytes, bytes_), spec, layout) for bytes_ in (storage, storage.clone())
    )
    return first, second


def with_dtype(spec: KVCacheSpec, dtype: torch.dtype) -> KVCacheSpec:
    return KVCacheSpec(spec.num_kv_heads, spec.head_dim, spec.v_head_dim, dtype, spec.block_size)


def rows(spec: KVCacheSpec, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v inside one row of a fused product; their first row passes the largest 8-bit float."""
    K, D, V = spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    row = torch.randn(tokens, K * (D + V) + 3)
    row[0] *= 1e4
    row = row.to(dtype)
    return row[:, : K * D].unflatten(1, (K, D)), row[:, K * D : K * (D + V)].unflatten(1, (K, V))


def kv_dtypes(gpu: Gpu) -> list[tuple[torch.dtype, torch.dtype]]:
    f32, bf16, f16, fp8 = torch.float32, torch.bfloat16, torch.float16, FP8_DTYPES[gpu.chip.fp8]
    return [(f32, f32), (f32, bf16), (f16, f16), (bf16, bf16), (f32, fp8), (bf16, fp8)]


@pytest.mark.parametrize(("shape", "layout"), SHAPES)
def test_write_kv(gpu: Gpu, reference: ReferenceOps, shape: KVCacheSpec, layout: KVLayout) -> None:
    slots = torch.tensor([5, -1, 0, 7, 3, -1, 6])  # two rows more than there are slots
    for (dtype, kv_dtype), kind in itertools.product(kv_dtypes(gpu), ("none", "tensor", "head")):
        if kind != "none" and kv_dtype.itemsize > 1:
            continue
        spec = with_dtype(shape, kv_dtype)
        k, v = rows(spec, 9, dtype)
        mine, theirs = two_caches(spec, layout)
        count = spec.num_kv_heads if kind == "head" else 1
        scales = {} if kind == "none" else {name: torch.rand(count) + 0.3 for name in ("k_scale", "v_scale")}
        CacheOps(gpu).write_kv(k, v, mine, slots, **scales)
        reference.write_kv(k, v, theirs, slots, **scales)
        assert torch.equal(mine.storage, theirs.storage), (dtype, kv_dtype, kind)


@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(64, False), (64, True), (24, False), (24, True)])
def test_rope_write_kv_is_rotary_then_write(
    gpu: Gpu, reference: ReferenceOps, rotary_dim: int, interleaved: bool
) -> None:
    """Quarter turns are exact, so that every byte must agree; k must be left as it was."""
    shape, slots = KVCacheSpec(2, 64, 48, torch.float32, 16), torch.tensor([5, -1, 100, 7])
    turns = torch.randint(0, 4, (20, rotary_dim // 2))
    table = torch.cat((torch.tensor([1.0, 0, -1, 0])[turns], torch.tensor([0.0, 1, 0, -1])[turns]), dim=1)
    positions = torch.tensor([19, 3, 3, 0, 8])
    for dtype, kv_dtype in kv_dtypes(gpu):
        spec = with_dtype(shape, kv_dtype)
        q, (k, v) = torch.randn(5, 4, 64).to(dtype), rows(spec, 5, dtype)
        before = k.clone()
        scale = torch.tensor([0.7, 1.9])
        scales = {"k_scale": scale, "v_scale": scale.flip(0)} if kv_dtype.itemsize == 1 else {}
        mine, theirs = two_caches(spec, KVLayout.HND)
        out_q, want_q = torch.empty_like(q), torch.empty_like(q)
        arguments = {"interleaved": interleaved, **scales}
        reference.rope_write_kv(q, k, v, positions, table, theirs, slots, out_q=want_q, **arguments)
        CacheOps(gpu).rope_write_kv(q, k, v, positions, table, mine, slots, out_q=out_q, **arguments)
        assert torch.equal(out_q, want_q)
        assert torch.equal(k, before)
        assert torch.equal(mine.storage, theirs.storage), (dtype, kv_dtype)


def test_write_mla(gpu: Gpu, reference: ReferenceOps) -> None:
    slots = torch.tensor([5, -1, 100, 7])
    for dtype, kv_dtype in kv_dtypes(gpu):
        mine, theirs = two_caches(KVCacheSpec(1, 40, 0, kv_dtype, 16), KVLayout.MLA)
        latent, k_rope = torch.randn(4, 35).to(dtype)[:, :32], torch.randn(4, 8).to(dtype)
        CacheOps(gpu).write_mla(latent, k_rope, mine, slots)
        reference.write_mla(latent, k_rope, theirs, slots)
        assert torch.equal(mine.storage, theirs.storage), (dtype, kv_dtype)


MOVED = [(shape, layout, torch.float32) for shape, layout in SHAPES] + [
    (SHAPES[0][0], KVLayout.HND, torch.bfloat16),
    (SHAPES[1][0], KVLayout.NHD, torch.float8_e4m3fnuz),
    (KVCacheSpec(1, 72, 0, torch.float32, 4), KVLayout.MLA, torch.float8_e4m3fn),
]


@pytest.mark.parametrize(("shape", "layout", "dtype"), MOVED)
def test_blocks_move_as_bytes(
    gpu: Gpu, reference: ReferenceOps, shape: KVCacheSpec, layout: KVLayout, dtype: torch.dtype
) -> None:
    ops, spec = CacheOps(gpu), with_dtype(shape, dtype)
    mine, theirs = two_caches(spec, layout)
    for pairs in PAIRS.values():
        order = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        ops.copy_blocks(mine, order)
        reference.copy_blocks(theirs, order)
        assert torch.equal(mine.storage, theirs.storage), pairs
    ids = torch.tensor([5, 1, 5])
    sizes = [(3, spec.block_size, spec.num_kv_heads, width) for width in (spec.head_dim, spec.v_head_dim)]
    moved, wanted = ([torch.zeros(size).to(dtype) for size in sizes] for _ in range(2))
    ops.gather_blocks(mine, ids, out_k=moved[0], out_v=moved[1])
    reference.gather_blocks(theirs, ids, out_k=wanted[0], out_v=wanted[1])
    for got, want in zip(moved, wanted, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    ids = torch.tensor([2, 0])
    ops.scatter_blocks(mine, ids, *(x[:2] for x in moved))
    reference.scatter_blocks(theirs, ids, *(x[:2] for x in wanted))
    assert torch.equal(mine.storage, theirs.storage)


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops, other = CacheOps(gpu), FP8_DTYPES["e4m3fnuz" if gpu.chip.fp8 == "e4m3fn" else "e4m3fn"]
    f32 = torch.float32
    assert ops.supports("write_kv", CacheSpec(2, 64, 64, f32, FP8_DTYPES[gpu.chip.fp8], 16, KVLayout.HND)) is None
    assert ops.supports("copy_blocks", CacheSpec(2, 64, 64, f32, other, 16, KVLayout.HND)) is None
    for spec in (
        CacheSpec(2, 64, 64, f32, other, 16, KVLayout.HND),
        CacheSpec(2, 64, 64, f32, f32, 16, KVLayout.HDN),
        CacheSpec(2, 64, 64, torch.float64, f32, 16, KVLayout.NHD),
        CacheSpec(2, 2048, 64, f32, f32, 16, KVLayout.NHD),
    ):
        refusal = ops.supports("write_kv", spec)
        assert refusal is not None
        assert refusal.reason
