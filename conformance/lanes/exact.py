"""The exact lane: inputs for which every order of summation gives the same bits, and the comparison.

Small integers are added exactly as long as every partial sum, in units of the least bit of any term, stays ≤ 2^bits
of the accumulator (24 for fp32). Σ|terms| ≤ 2^bits ensures that for every order, blocked or split however it may be.
The result must be representable in the output's dtype: |c| ≤ 2^p units, p = 8 for bf16, 11 for fp16, 24 for fp32.

    column            0 … half-1                half … 2·half-1            the one left over when K is odd
    x [M, K]          p (positive, ≤ m)         the same p                 1
    w [N, K]          ± q (positive, ≤ m)       ∓ q + delta                delta
                      the sum climbs to         and falls back, leaving
                      ±half·E[p]·E[q] » 2^13    c = x · delta, small

so a 16-bit accumulator, a dropped K tail, a stale tile or swapped scales can't hide, and c itself is small.
delta is non-zero in SIGNAL columns only, where x is 1 or 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.finding import Finding

SIGNAL_COLUMNS = 4
SIGNAL_X = 2
OUTPUT_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
"""Integers up to 2^bits are representable. Never written to."""


def exact(output: str, got: torch.Tensor, want: torch.Tensor) -> Finding:
    """Bit for bit, except that the two zeros are one (`torch.equal`). want is rounded to got's dtype first."""
    rounded = want.to(got.dtype)
    if got.shape != want.shape:
        return Finding(
            lane="exact",
            output=output,
            compared=0,
            share=math.inf,
            message=f"shape {list(got.shape)}, not {list(want.shape)}",
        )
    wide = torch.float64 if got.dtype.is_floating_point else torch.int64
    a, b = got.to(wide), rounded.to(wide)
    differs = (a != b) & ~(a.isnan() & b.isnan()) if a.dtype.is_floating_point else a != b
    if not bool(differs.any()):
        return Finding(lane="exact", output=output, compared=got.numel())
    index = tuple(differs.nonzero()[0].tolist())
    count = int(differs.sum())
    return Finding(
        lane="exact",
        output=output,
        compared=got.numel(),
        share=math.inf,
        index=index,
        message=f"{count} of {got.numel()} elements differ, first at {list(index)}: {a[index].item()}, "
        f"not {b[index].item()}",
    )


def magnitude(terms: int, bits: int, operand_bits: int = 8) -> int:
    """The largest m with terms · m² ≤ 2^bits, at most 2^operand_bits (what the operands' dtype holds exactly).

    Half of the budget is left for bias, residual and delta.
    """
    fits = math.isqrt((1 << bits - 1) // max(terms, 1))
    return max(1, min(1 << operand_bits, fits))


@dataclass(frozen=True)
class ExactProduct:
    """Integers for c = x @ w.T.

    Attributes:
        x_MK, w_NK: float32 holding integers.
    """

    x_MK: torch.Tensor
    w_NK: torch.Tensor


def product(
    draw: Draw, m: int, n: int, k: int, *, limit: int, operand_bits: int = 8, delta_NJ: torch.Tensor | None = None
) -> ExactProduct:
    """Operands whose sums climb and cancel, leaving |c| ≤ limit.

    Args:
        limit: of |c|, in units; at least 16.
        operand_bits: integers up to 2^operand_bits survive in the operands' dtype and in the accumulator's operands.
        delta_NJ: what is left over per signal column, [N, J ≤ signal_columns(k)]; drawn when not given.
    """
    half = k // 2
    bound = magnitude(k, draw.accumulation.bits, min(operand_bits, draw.accumulation.operand_bits) - 1)
    x = draw.integers(max(1, bound // 2), bound, m, k)
    x[:, half : 2 * half] = x[:, :half]
    w = draw.integers(max(1, bound // 2), bound, n, k) * draw.signs(n, 1)
    w[:, half : 2 * half] = -w[:, :half]
    columns = signal_columns(k)
    x[:, columns] = draw.integers(1, SIGNAL_X, m, len(columns))
    if half:
        # A signal column has a partner in the first half, which must go on cancelling.
        partners = [c - half for c in columns if half <= c < 2 * half]
        x[:, partners] = x[:, [p + half for p in partners]]
    if k % 2:
        w[:, k - 1] = 0
    if delta_NJ is None:
        top = max(1, limit // (2 * SIGNAL_X * max(len(columns), 1)))
        delta_NJ = draw.integers(1, top, n, len(columns)) * draw.signs(n, len(columns))
    w[:, columns[: delta_NJ.shape[1]]] += delta_NJ
    return ExactProduct(x, w)


def signal_columns(k: int) -> list[int]:
    """Columns that carry the result: the last ones, where tails are dropped, and the middle."""
    half = k // 2
    wanted = [k - 1, k - 2, half, half + (k - half) // 2]
    return [c for i, c in enumerate(wanted) if half <= c < k and c not in wanted[:i]][:SIGNAL_COLUMNS]


def power_of_two_scales(draw: Draw, *shape: int, spread: int) -> torch.Tensor:
    """Distinct-looking scales 2^0 … 2^-spread, neighbours along the last axis never equal.

    They cost `spread` bits of the budget: pass bits - spread to `magnitude`.
    """
    exponent = draw.integers(0, spread, *shape, dtype=torch.int64)
    steps = torch.arange(shape[-1]) if spread else torch.zeros(shape[-1], dtype=torch.int64)
    base = exponent[..., :1]
    return torch.exp2(-((base + steps) % (spread + 1)).to(torch.float32))
