"""Quantised weights for the products' cases, in the parts that a loader would place, and the x that suits them.

    exact     scales are powers of two, neighbours along rows and columns differ, and a transposed grid differs too
    typical   codes near normal, scales of any mantissa

    Drawn ── parts      QuantizedTensor and the row at which it is placed: two, so that a part's own scales matter
          └─ largest    the sizes of an element's terms together, in units: what |x| = 1 costs of the accumulator's bits

GGUF's numbers are drawn in gguf_weights.py. gemm_quant.py and grouped_quant.py make cases of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.grid import gguf_weights
from octavo.conformance.oracle import gguf, quantise
from octavo.core.backend import QuantFormat, QuantizedTensor, QuantScheme

INT8, INT4, FP8, FNUZ = QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ
MXFP4 = QuantFormat.MXFP4
CODES = {INT8: (-127, 127), INT4: (-8, 7), FP8: (-16, 16), FNUZ: (-16, 16)}
"""Codes of symmetric schemes; of fp8 those that are integers and all representable. Never written to."""

UNSIGNED = {INT8: (0, 127), INT4: (0, 15)}
"""Codes and zero points of schemes that have them: all of int4's. Never written to."""

SPREAD = 2
"""Scales are 2^0 … 2^-SPREAD."""

MXFP4_LARGEST = 12
"""The largest code in units of 0.5."""

MXFP4_EXPONENTS = {torch.float16: (-6, 3)}
"""Of a row's scales, so that values stay normal numbers in x's dtype. Never written to."""

MXFP4_WIDE = (-100, 100)

ACTIVATION_TOP = {INT8: 127, FP8: 14, FNUZ: 15}
"""The largest |x|: a power of two times the format's largest code. Never written to."""


@dataclass(frozen=True)
class Drawn:
    """See the module's picture."""

    parts: tuple[tuple[QuantizedTensor, int], ...]
    largest: int

    def dense(self) -> torch.Tensor:
        """What it means, float64 [N, K], by the oracle's own tables."""
        return torch.cat([quantise.dequantise(part) for part, _ in self.parts])

    def term_squares(self, x: torch.Tensor, *, is_gated: bool = False) -> torch.Tensor:
        """Σ of the squares of what is added for each output, [M, N or N / 2], where codes and offsets are apart."""
        sizes = torch.cat([quantise.term_sizes(part) for part, _ in self.parts])
        squares = x.double().square() @ sizes.square().T
        return sum(squares.chunk(2, dim=1), torch.zeros(())) if is_gated else squares


def exact_weight(
    scheme: QuantScheme,
    n: int,
    k: int,
    draw: Draw,
    *,
    dtype: torch.dtype,
    most: int | None = None,
    is_gated: bool = False,
) -> Drawn:
    """A weight for the exact lane.

    Args:
        dtype: of x; a kernel may keep what it dequantised in it.
        most: the largest |code - zero point| of integers and fp8; None: what the format holds.
    """
    base = int(draw.integers(0, SPREAD, 1))
    parts, sizes = [], []
    for index, (first, rows) in enumerate(_cuts(scheme, n, is_gated=is_gated)):
        if scheme.format.block is not None:
            part, size = _exact_blocks(scheme, rows, k, draw, is_narrow=_is_narrow(dtype, draw))
        elif scheme.format is MXFP4:
            part, size = _exact_mxfp4(scheme, rows, k, draw, base + first, dtype), MXFP4_LARGEST * 2**SPREAD
        else:
            start = base + (index if scheme.group_size == -1 else -(-first // scheme.block_rows))
            part, size = _exact_codes(scheme, rows, k, draw, start, most)
        parts.append((part, first))
        sizes.append(size)
    return Drawn(tuple(parts), max(sizes))


def typical_weight(scheme: QuantScheme, n: int, k: int, draw: Draw, *, is_gated: bool = False) -> Drawn:
    """A weight for the statistical lane, of standard deviation 1 / √K or so."""
    parts = [(_typical(scheme, rows, k, draw), first) for first, rows in _cuts(scheme, n, is_gated=is_gated)]
    return Drawn(tuple(parts), 0)


def dense_x(scheme: QuantScheme, m: int, k: int, draw: Draw, *, largest: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole x, as large as the budget Σ|x| · largest ≤ 2^bits allows, never 0 but for want of budget.

    Where activations are quantised, each group of x that isn't 0 holds its largest code times 2^k, so that quantising
    it is exact; groups are of different sizes, since their scales are part of the answer.
    """
    budget = 2**draw.accumulation.bits // largest
    if scheme.activation is None:
        top, columns = max(1, min(127, budget // k)), min(k, budget)
        return _whole(m, k, draw, top, max(1, columns)).to(dtype)
    top = ACTIVATION_TOP[scheme.activation]
    group = scheme.activation_group_size if scheme.activation_group_size > 0 else k
    columns = max(1, min(k, budget // (top if group >= k else 2 * top)))
    x = _whole(m, k, draw, top, columns)
    fits_twice = top * 2 < {torch.bfloat16: 2**8, torch.float16: 2**11}.get(dtype, 2**24)
    for start in range(0, k, group):
        part = x[:, start : start + group]
        at = part.abs().argmax(dim=1, keepdim=True)
        part.scatter_(1, at, part.gather(1, at).sign() * top)
        part *= torch.exp2(draw.integers(0, 1, m, 1)) if fits_twice else 1
    return x.to(dtype)


def cover_x(m: int, k: int, draw: Draw, dtype: torch.dtype) -> torch.Tensor:
    """±1 in each column of exactly one row."""
    x = torch.zeros(m, k)
    owner = torch.tensor(draw.permutation(k)) % m
    x[owner, torch.arange(k)] = draw.signs(k)
    return x.to(dtype)


def _whole(m: int, k: int, draw: Draw, top: int, columns: int) -> torch.Tensor:
    """±1 … ±top in `columns` columns of each row, top itself in one of them."""
    x = draw.integers(1, top, m, k) * draw.signs(m, k)
    for row in range(m):
        order = draw.permutation(k)
        x[row, order[columns:]] = 0
        x[row, order[0]] = top
    return x


def _cuts(scheme: QuantScheme, n: int, *, is_gated: bool) -> list[tuple[int, int]]:
    """First row and rows of each part: gate and up of a gated weight, else two where blocks of rows allow it."""
    cut = n // 2
    if not is_gated and scheme.block_rows > 1:
        cut = max(cut // scheme.block_rows, 1) * scheme.block_rows
    return [(0, cut), (cut, n - cut)] if 0 < cut < n else [(0, n)]


def _is_narrow(dtype: torch.dtype, draw: Draw) -> bool:
    return dtype != torch.float32 or draw.accumulation.operand_bits < 24


def _steps(shape: tuple[int, int], start: int) -> torch.Tensor:
    """A number per scale; modulo 3 neighbours differ, and so does what stands at [j, i] from what stands at [i, j]."""
    return (start + torch.arange(shape[0])[:, None] + 2 * torch.arange(shape[1])[None, :]).float()


def _exact_codes(
    scheme: QuantScheme, rows: int, k: int, draw: Draw, start: int, most: int | None
) -> tuple[QuantizedTensor, int]:
    low, high = CODES[scheme.format] if scheme.symmetric else UNSIGNED[scheme.format]
    if most is not None:
        low, high = max(low, -min(most, high)), min(most, high)
    shape = scheme.scale_shape(rows, k)
    codes = draw.integers(low, high, rows, k).to(scheme.format.code_dtype)
    scales = torch.exp2(-(_steps(shape, start) % (SPREAD + 1)))
    zero_points = None
    if not scheme.symmetric:  # each of low .. high in turn, from a random one on: neighbours always differ
        first = draw.integers(low, high, 1)
        zero_points = ((torch.arange(math.prod(shape)) + first) % (high - low + 1) + low).reshape(shape).float()
    return QuantizedTensor(scheme, codes, scales, zero_points), max(abs(low), high) * 2**SPREAD


def _exact_mxfp4(scheme: QuantScheme, rows: int, k: int, draw: Draw, start: int, dtype: torch.dtype) -> QuantizedTensor:
    """Each row has scales of its own size; within it they stay within 2^SPREAD of each other."""
    size = draw.integers(*MXFP4_EXPONENTS.get(dtype, MXFP4_WIDE), rows, 1)
    codes = draw.integers(0, 15, rows, k, dtype=torch.uint8)
    scales = torch.exp2(size - _steps(scheme.scale_shape(rows, k), start) % (SPREAD + 1))
    return QuantizedTensor(scheme, codes, scales)


def _exact_blocks(
    scheme: QuantScheme, rows: int, k: int, draw: Draw, *, is_narrow: bool
) -> tuple[QuantizedTensor, int]:
    layout = gguf.layouts()[scheme.format]
    numbers = gguf_weights.exact_fields(layout, rows, k // layout.elements, draw, is_narrow=is_narrow)
    return _of_fields(scheme, layout, numbers, rows), gguf_weights.largest(layout, numbers)


def _of_fields(scheme: QuantScheme, layout: gguf.Layout, numbers: gguf.Fields, rows: int) -> QuantizedTensor:
    blocks = gguf.encode(layout, numbers).reshape(rows, -1)
    return QuantizedTensor(scheme, blocks, torch.empty(rows, 0))


def _typical(scheme: QuantScheme, rows: int, k: int, draw: Draw) -> QuantizedTensor:
    if scheme.format.block is not None:
        layout = gguf.layouts()[scheme.format]
        return _of_fields(scheme, layout, gguf_weights.typical_fields(layout, rows, k // layout.elements, draw), rows)
    shape = scheme.scale_shape(rows, k)
    if scheme.format is MXFP4:
        codes = draw.integers(0, 15, rows, k, dtype=torch.uint8)
        return QuantizedTensor(scheme, codes, torch.exp2(draw.integers(-3, 1, *shape) - round(math.log2(k) / 2)))
    limit = quantise.LARGEST[scheme.format]
    values = draw.normal(rows, k, mean=0.2).double() * limit / 4
    scales = k**-0.5 * 4 / limit * torch.exp2(draw.normal(*shape) / 2)
    if scheme.format in (FP8, FNUZ):
        codes = quantise.round_to_fp8(values, is_fnuz=scheme.format is FNUZ).float()
        return QuantizedTensor(scheme, codes.to(scheme.format.code_dtype), scales)
    low, high = CODES[scheme.format] if scheme.symmetric else UNSIGNED[scheme.format]
    zero_points = None
    if not scheme.symmetric:
        zero_points = draw.integers(low + (high - low) // 3, high - (high - low) // 3, *shape)
        group = scheme.group_size if scheme.group_size > 0 else k
        values = values / 2 + zero_points.repeat_interleave(group, 1)[:, :k]
    return QuantizedTensor(scheme, values.round().clamp(low, high).to(torch.int8), scales, zero_points)
