"""Numbers for GGUF blocks, as `oracle/gguf.py` encodes them.

    exact     d, scales and minimums differ from every neighbour's, and every value is a small multiple of one unit
                wide     any 6 bits of scale and minimum, any bias between d and dmin: up to 14 bits a value
                narrow   scales 2^j and minimums that are multiples of them, so that a value fits 8 bits and a kernel
                         that keeps weights in bf16 gives the same
    typical   what a quantiser leaves of normal weights: d of any mantissa, minimums that centre the codes

A scale or minimum that is stale, swapped, short of a bit or read unsigned then changes most of a row.
"""

from __future__ import annotations

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.oracle.gguf import Fields, Layout

SPREAD = 2
"""d is 2^0 … 2^-SPREAD."""

UNIT = 2.0 ** -(SPREAD + 1)
"""Values of exact blocks are multiples of it."""

SIX_BITS = 63
LOWEST_SCALE = -128
"""The scale of Q6_K that has no positive twin."""


def exact_fields(layout: Layout, rows: int, blocks: int, draw: Draw, *, is_narrow: bool) -> Fields:
    """Numbers for rows · blocks blocks."""
    count = rows * blocks
    steps = (torch.arange(rows)[:, None] + 2 * torch.arange(blocks)[None, :]).reshape(count, 1)
    steps = steps + draw.integers(0, SPREAD, 1)
    d = torch.exp2(-(steps % (SPREAD + 1)))
    low, high = code_range(layout)
    codes = draw.integers(low, high, count, layout.elements)
    if layout.scales is None:
        return Fields(codes, d, _added(d, draw, is_narrow=is_narrow) if layout.dmin is not None else None)
    power = (torch.arange(layout.groups) + draw.integers(0, 5, count, 1)) % 6
    scales = torch.exp2(power) if is_narrow else _distinct(draw, 1, count, layout.groups)
    if layout.is_scale_signed:
        scales = scales * draw.signs(*scales.shape)
        scales[torch.arange(count), draw.integers(0, layout.groups - 1, count, dtype=torch.int64)] = LOWEST_SCALE
        return Fields(codes, d, scales=scales)
    if not is_narrow:
        dmin = torch.exp2(-((steps + 1) % (SPREAD + 1)))
        return Fields(codes, d, dmin, scales, _distinct(draw, 0, count, layout.groups))
    # dmin = d / 2 and minimum = 2^(j + 1) · t: a value is d · 2^j · (q - t).
    most = SIX_BITS // (2 * scales).to(torch.int64)
    t = draw.integers(0, SIX_BITS, *scales.shape, dtype=torch.int64) % most.clamp(min=1) + 1
    return Fields(codes, d, d / 2, scales, 2 * scales * torch.minimum(t, most))


def largest(layout: Layout, numbers: Fields) -> int:
    """The largest |d · scale · code| + |d · scale · bias| + |dmin · minimum| of any element, in units."""
    scale = numbers.d if numbers.scales is None else numbers.d * numbers.scales
    code = max(abs(bound) for bound in code_range(layout)) + layout.bias
    offset = torch.zeros(1) if numbers.dmin is None else numbers.dmin
    offset = offset if numbers.minimums is None else offset * numbers.minimums
    return int((scale.abs().max() * code + offset.abs().max()) / UNIT)


def typical_fields(layout: Layout, rows: int, blocks: int, draw: Draw) -> Fields:
    """Numbers whose values are near normal, of standard deviation 1 / √K."""
    count, (low, high) = rows * blocks, code_range(layout)
    middle, width = (low + high + 1) / 2, (high - low) / 5
    codes = (draw.normal(count, layout.elements, mean=0.2) * width + middle).round().clamp(low, high)
    std = (blocks * layout.elements) ** -0.5
    top = 127 if layout.is_scale_signed else SIX_BITS
    scales = None if layout.scales is None else draw.integers(top // 3, top, count, layout.groups)
    size = std / width / (1 if scales is None else top * 2 / 3)
    d = (size * torch.exp2(draw.normal(count, 1) / 2)).half().float()
    if layout.bias:
        d = d * draw.signs(count, 1)
    if layout.is_scale_signed and scales is not None:
        scales = scales * draw.signs(*scales.shape)
    if layout.dmin is None:
        return Fields(codes, d, scales=scales)
    near = 1 + draw.normal(count, 1) / 10
    dmin = (d * middle * (-near if layout.adds else near)).half().float()
    if scales is None:
        return Fields(codes, d, dmin)
    minimums = (scales + draw.integers(-3, 3, *scales.shape)).clamp(0, SIX_BITS)
    return Fields(codes, d, dmin, scales, minimums)


def code_range(layout: Layout) -> tuple[int, int]:
    """The lowest and highest code; of 8 bits those with a negative twin."""
    bits = layout.codes.shape[1]
    return (-(2 ** (bits - 1)) + 1, 2 ** (bits - 1) - 1) if layout.is_code_signed else (0, 2**bits - 1)


def _added(d: torch.Tensor, draw: Draw, *, is_narrow: bool) -> torch.Tensor:
    """The minimum of a format that has one per block, added to its values."""
    size = draw.integers(1, 31 if is_narrow else 120, *d.shape) * draw.signs(*d.shape)
    return size * (d if is_narrow else 2.0**-SPREAD)


def _distinct(draw: Draw, low: int, rows: int, columns: int) -> torch.Tensor:
    """In each row different numbers low .. 63."""
    picks = [draw.permutation(SIX_BITS + 1 - low)[:columns] for _ in range(rows)]
    return torch.tensor(picks, dtype=torch.float32) + low
