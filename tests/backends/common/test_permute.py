"""The way to the experts and back on GPUs against the reference: orders exactly, sums to a rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.permute import PermuteOps
from octavo.backends.common.tuning import Entry, TuningTable
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import RowSpec
from octavo.core.base.errors import UnsupportedOp

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RTOL = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def permuted(ops: PermuteOps | ReferenceOps, ids: torch.Tensor, first: int, experts: int) -> list[torch.Tensor]:
    rows, start = torch.full((ids.numel(),), -9), torch.full((experts + 1,), -9, dtype=torch.int32)
    places = torch.full((ids.shape[0], ids.shape[1] + 3), -9)[:, : ids.shape[1]]
    ops.moe_permute(ids, first_expert=first, out_rows=rows, out_places=places, segment_start=start)
    return [rows, places, start]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "all_experts", "first", "experts"),
    [
        (1, 1, 1, 0, 1),
        (5, 2, 8, 0, 8),
        (5, 3, 8, 2, 4),  # some are elsewhere
        (90, 4, 60, 0, 60),  # several blocks of pairs, experts that are no multiple of a tile
        (40, 8, 128, 64, 64),
        (6, 2, 400, 0, 400),  # most have no pair
        (3, 2, 8, 100, 4),  # all are elsewhere
        (0, 2, 8, 0, 8),
    ],
)
def test_permute(
    gpu: Gpu,
    reference: ReferenceOps,
    tokens: int,
    top_k: int,
    all_experts: int,
    first: int,
    experts: int,
    dtype: torch.dtype,
) -> None:
    ids = torch.randint(all_experts, (tokens, top_k + 2)).to(dtype)[:, :top_k]
    if tokens > 2:
        ids[1, 0], ids[2] = -1, ids[0]
    got, want = permuted(PermuteOps(gpu), ids, first, experts), permuted(reference, ids, first, experts)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


def test_more_blocks_than_are_counted_at_once(gpu: Gpu, reference: ReferenceOps) -> None:
    tile = {"PAIRS": 4, "EXPERTS": 2, "BLOCKS": 4}
    small = replace(gpu, tuning=TuningTable([Entry("moe_permute", {}, tile, {})]))
    ids = torch.randint(7, (50, 2))
    got, want = permuted(PermuteOps(small), ids, 1, 5), permuted(reference, ids, 1, 5)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(5, 2, 17), (1, 8, 1), (7, 4, 1100), (0, 2, 64)])
def test_combine(gpu: Gpu, reference: ReferenceOps, tokens: int, top_k: int, width: int, dtype: torch.dtype) -> None:
    y = torch.randn(tokens * top_k + 2, width + 3).to(dtype)[:, :width]
    places = torch.randperm(tokens * top_k).view(tokens, top_k)
    weights = torch.rand(tokens, top_k)
    if tokens > 1:
        places[0, 0], weights[0, 0], places[-1] = -1, math.nan, -1
    y[-2:] = math.nan  # rows that no place names
    residual = torch.randn(tokens, width).to(dtype)
    out, want = torch.empty_like(residual), torch.empty_like(residual)
    PermuteOps(gpu).moe_combine(y, places, weights, out=out)
    reference.moe_combine(y, places, weights, out=want)
    torch.testing.assert_close(out, want, rtol=RTOL[dtype], atol=1e-6)
    reference.moe_combine(y, places, weights, out=want, residual=residual)
    PermuteOps(gpu).moe_combine(y, places, weights, out=residual, residual=residual)
    torch.testing.assert_close(residual, want, rtol=RTOL[dtype], atol=1e-6)


def test_what_is_not_supported_is_said(gpu: Gpu) -> None:
    ops = PermuteOps(gpu)
    assert ops.supports("moe_permute", RowSpec(8, torch.int32, extent=2)) is None
    assert ops.supports("moe_combine", RowSpec(8, torch.bfloat16, "residual", 2)) is None
    for op, spec in (
        ("moe_permute", RowSpec(8, torch.int16, extent=2)),
        ("moe_combine", RowSpec(8, torch.float64)),
        ("moe_combine", RowSpec(8, torch.float32, "gated")),
    ):
        refusal = ops.supports(op, spec)
        assert refusal is not None
        assert refusal.reason
    with pytest.raises(UnsupportedOp, match="int16"):
        permuted(ops, torch.zeros(2, 2, dtype=torch.int16), 0, 4)
    with pytest.raises(ValueError, match="into"):
        ops.moe_combine(torch.zeros(2, 4), torch.zeros(2, 1), torch.zeros(2, 1), out=torch.zeros(2, 3))
