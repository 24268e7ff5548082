"""Faults of matrix products, over plain and quantised weights."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, Wrap, after, around, before, unwritten
from octavo.core.backend import Epilogue

TILE_M = 8
SLICE_K = 64
GROUP_K = 128
FP16_MAX = 65504.0


def whole_tiles_of_k(tile: int, fits: int) -> Wrap:
    """The columns beyond the last whole tile never reach the sum. K that isn't a multiple of `fits` has a path of its
    own, which is right."""

    @before
    def cut(call: Call) -> None:
        x = call["x_TK"]
        whole = x.shape[1] // tile * tile
        if 0 < whole < x.shape[1] and x.shape[1] % fits == 0:
            call["x_TK"] = x.clone()
            call["x_TK"][:, whole:] = 0

    return cut


def slices(honest: Op, call: Call, step: int) -> list[torch.Tensor]:
    """fp32 products of slices of K; x outside a slice is 0."""
    x, parts = call["x_TK"], []
    for start in range(0, x.shape[1], step):
        part = torch.zeros_like(x)
        part[:, start : start + step] = x[:, start : start + step]
        parts.append(torch.empty(call["out"].shape, dtype=torch.float32))
        honest(**call | {"x_TK": part, "out": parts[-1], "epilogue": None})
    return parts


def is_plain(call: Call) -> bool:
    """Only a product, over a plain weight."""
    has_epilogue = call["epilogue"] not in (None, Epilogue())
    return call["prologue"] is None and not has_epilogue and call["w"].spec.scheme is None


@around
def sum_in_fp16(honest: Op, call: Call) -> None:
    """From one slice of K to the next the sum is kept in fp16."""
    if not is_plain(call) or call["x_TK"].shape[1] <= SLICE_K:
        honest(**call)
        return
    total = torch.zeros(call["out"].shape, dtype=torch.float16)
    for part in slices(honest, call, SLICE_K):
        total = (total.float() + part).half()
    call["out"].copy_(total)


@around
def partials_in_fp16(honest: Op, call: Call) -> None:
    """fp16: K is split in two, and what each half leaves is stored in fp16, where 65,504 is the largest number."""
    if call["x_TK"].dtype != torch.float16 or not is_plain(call) or call["x_TK"].shape[1] < 2:
        honest(**call)
        return
    honest(**call)
    halves = slices(honest, call, call["x_TK"].shape[1] // 2)
    for part in halves:
        overflow = part.half()
        call["out"][overflow.isinf()] = overflow[overflow.isinf()]


@after
def exponential_in_fp16(call: Call) -> None:
    """exp(gate) / (1 + exp(gate)) in fp16 is inf / inf from a gate of log(65,504) on."""
    x, out = call["x"], call["out"]
    if x.dtype == torch.float16:
        out[x[..., : out.shape[-1]] > math.log(FP16_MAX)] = math.nan


@around
def squares_in_fp16(honest: Op, call: Call) -> None:
    """One square beyond 65,504, and the row is divided by inf."""
    x = call["x"] if call["residual"] is None else call["x"] + call["residual"]
    honest(**call)
    if x.dtype == torch.float16:
        call["out"][x.square().isinf().any(dim=-1)] = 0


def all_in_fp16(honest: Op) -> Op:
    """Each op where it overflows first."""
    wraps = {"gemm": partials_in_fp16, "act_mul": exponential_in_fp16, "rms_norm": squares_in_fp16}
    return wraps[honest.__name__](honest)


def without(part: str) -> Wrap:
    """The epilogue ignores one of its parts."""

    @before
    def drop(call: Call) -> None:
        if call["epilogue"] is not None:
            call["epilogue"] = replace(call["epilogue"], **{part: None})

    return drop


@around
def whole_tiles_of_rows(honest: Op, call: Call) -> None:
    """Rows beyond the last whole tile are never written."""
    rows = call["x_TK"].shape[0]
    whole = rows // TILE_M * TILE_M
    unwritten(honest, call, "out", at=slice(whole if whole else rows, rows))


@around
def large_segments_only(honest: Op, call: Call) -> None:
    """A segment of fewer rows than the tile is masked away."""
    bounds = call["segment_start"].tolist()
    spans = itertools.pairwise(bounds)
    lost = [row for start, end in spans if end - start < TILE_M for row in range(start, end)]
    unwritten(honest, call, "out", at=lost)


@around
def gate_and_up_swapped(honest: Op, call: Call) -> None:
    """The pair is taken for [up | gate]."""
    half = call["x"].shape[-1] // 2
    call["x"] = call["x"].roll(half, dims=-1)
    honest(**call)


K_TAILS = tuple(
    Mutant(
        f"gemm-k-not-multiple-{tile}",
        f"K that is a multiple of {fits} but not of {tile}: the last columns are left out of the sum",
        "GEMM kernels tuned for the sizes of popular models",
        "gemm",
        whole_tiles_of_k(tile, fits),
    )
    for tile, fits in ((16, 1), (32, 16), (128, 32), (256, 128))
)

MUTANTS = (
    *K_TAILS,
    Mutant(
        "gemm-16-bit-accumulator",
        "from one slice of K to the next the sum is kept in fp16",
        "GEMM kernels with 'fast accumulation', split K over 16-bit buffers",
        "gemm",
        sum_in_fp16,
    ),
    Mutant(
        "fp16-overflow-to-inf",
        "in fp16 partial sums, squares or exponentials pass 65,504, though the result doesn't",
        "fp16 kernels that split K, or compute as they store",
        ("gemm", "act_mul", "rms_norm"),
        all_in_fp16,
    ),
    Mutant(
        "gemm-bias-dropped", "the bias is ignored", "fused epilogues chosen by a heuristic", "gemm", without("bias_N")
    ),
    Mutant(
        "gemm-residual-dropped",
        "the residual is ignored",
        "fused epilogues chosen by a heuristic",
        "gemm",
        without("residual"),
    ),
    Mutant(
        "gemm-row-tail-uninitialised",
        "rows beyond the last whole tile of 8 are never written",
        "GEMM kernels without a masked last tile",
        "gemm",
        whole_tiles_of_rows,
    ),
    Mutant(
        "grouped-gemm-m-below-tile",
        "experts with fewer rows than a tile are masked away: their rows are never written",
        "masked grouped GEMM of mixtures of experts",
        "grouped_gemm",
        large_segments_only,
    ),
    Mutant(
        "act-gate-up-swapped",
        "the pair [gate | up] is taken for [up | gate]",
        "libraries that disagree about the order",
        "act_mul",
        gate_and_up_swapped,
    ),
)
