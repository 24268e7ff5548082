"""GGUF blocks bit by bit: where each bit of each number lies, as tables. Decodes, and encodes what the cases draw.

    Layout ── codes [E, bits], scales [G, bits], minimums [G, bits]     positions of bits, the lowest first, in a block
           ├─ d, dmin                                                   bytes of two fp16 numbers
           └─ bias, is_scale_signed, adds

    value = d · scale · (code - bias) ∓ dmin · minimum        in float64; scale and minimum are 1 where there are none

Bit p of a block is bit p % 8 of its byte p // 8. It shares nothing with the decoders it judges: they shift words, this
gathers bits.

Source: the GGUF specification and block definitions of the ggml project; checked against the format's own package.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from octavo.core.backend import QuantFormat


@dataclass(frozen=True)
class Layout:
    """A block of a format; see the module's picture. `adds`: the minimum is added, as an offset is, not subtracted."""

    num_bytes: int
    codes: torch.Tensor
    d: int
    dmin: int | None = None
    scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    bias: int = 0
    is_code_signed: bool = False
    is_scale_signed: bool = False
    adds: bool = False

    @property
    def elements(self) -> int:
        return self.codes.shape[0]

    @property
    def groups(self) -> int:
        return 1 if self.scales is None else self.scales.shape[0]


@dataclass(frozen=True)
class Fields:
    """The numbers in n blocks, float64: codes [n, E]; scales and minimums [n, G]; d and dmin [n, 1]."""

    codes: torch.Tensor
    d: torch.Tensor
    dmin: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    minimums: torch.Tensor | None = None


def decode(quant_format: QuantFormat, blocks: torch.Tensor) -> torch.Tensor:
    """The values of rows of blocks, uint8 [N, row bytes], as float64 [N, K]."""
    layout = layouts()[quant_format]
    return values(layout, fields(layout, blocks.reshape(-1, layout.num_bytes))).reshape(blocks.shape[0], -1)


def fields(layout: Layout, blocks: torch.Tensor) -> Fields:
    """What n blocks [n, num_bytes] hold."""
    bits = (blocks[..., None].to(torch.int64) >> torch.arange(8) & 1).flatten(1)
    return Fields(
        codes=_gather(bits, layout.codes, is_signed=layout.is_code_signed),
        d=_half(blocks, layout.d),
        dmin=None if layout.dmin is None else _half(blocks, layout.dmin),
        scales=None if layout.scales is None else _gather(bits, layout.scales, is_signed=layout.is_scale_signed),
        minimums=None if layout.minimums is None else _gather(bits, layout.minimums),
    )


def values(layout: Layout, numbers: Fields) -> torch.Tensor:
    """What the numbers of n blocks mean, float64 [n, E]."""
    count = len(numbers.d)
    scale = numbers.d if numbers.scales is None else numbers.d * numbers.scales
    grouped = (numbers.codes - layout.bias).reshape(count, layout.groups, -1) * scale[..., None]
    if numbers.dmin is not None:
        offset = numbers.dmin if numbers.minimums is None else numbers.dmin * numbers.minimums
        grouped = grouped + offset[..., None] if layout.adds else grouped - offset[..., None]
    return grouped.reshape(count, -1)


def sizes(quant_format: QuantFormat, blocks: torch.Tensor) -> torch.Tensor:
    """|d · scale · code| + |d · scale · bias| + |dmin · minimum| of each element, float64 [N, K]."""
    layout = layouts()[quant_format]
    numbers = fields(layout, blocks.reshape(-1, layout.num_bytes))
    positive = Fields(
        numbers.codes.abs(),
        numbers.d.abs(),
        None if numbers.dmin is None else numbers.dmin.abs(),
        None if numbers.scales is None else numbers.scales.abs(),
        numbers.minimums,
    )
    summed = values(replace(layout, bias=-layout.bias, adds=True), positive)
    return summed.reshape(blocks.shape[0], -1)


def encode(layout: Layout, numbers: Fields) -> torch.Tensor:
    """Blocks [n, num_bytes] that hold these numbers. d and dmin must be fp16 numbers, the others fit their bits."""
    bits = torch.zeros(len(numbers.d), layout.num_bytes * 8, dtype=torch.int64)
    for at, numbers_in in (
        (layout.codes, numbers.codes),
        (layout.scales, numbers.scales),
        (layout.minimums, numbers.minimums),
    ):
        if at is not None and numbers_in is not None:
            bits[:, at] = numbers_in.to(torch.int64)[..., None] >> torch.arange(at.shape[1]) & 1
    blocks = (bits.reshape(len(numbers.d), -1, 8) << torch.arange(8)).sum(-1).to(torch.uint8)
    for start, number in ((layout.d, numbers.d), (layout.dmin, numbers.dmin)):
        if start is not None and number is not None:
            blocks[:, start : start + 2] = number.to(torch.float16).view(torch.uint8)
    return blocks


def _gather(bits: torch.Tensor, positions: torch.Tensor, *, is_signed: bool = False) -> torch.Tensor:
    """The numbers whose bits lie at these positions; signed ones in two's complement."""
    width = positions.shape[1]
    numbers = (bits[:, positions] << torch.arange(width)).sum(-1).double()
    return torch.where(numbers >= 2 ** (width - 1), numbers - 2**width, numbers) if is_signed else numbers


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).double()


@functools.cache
def layouts() -> dict[QuantFormat, Layout]:
    """Every format's layout. Never written to."""
    small = torch.arange(32)
    nibble = functools.partial(_run, bits=4)

    def legacy(start: int) -> torch.Tensor:
        """Low nibbles are elements 0..15, high ones 16..31."""
        return nibble(8 * (start + small % 16) + 4 * (small // 16))

    def fifth(codes: torch.Tensor, start: int) -> torch.Tensor:
        return torch.cat((codes, (8 * start + small)[:, None]), dim=1)

    k4, k5 = _k_nibbles(16), torch.cat((_k_nibbles(48), _k_fifth()), dim=1)
    scales, minimums = _k_scales()
    six = _run(8 * (192 + torch.arange(16)), bits=8)
    return {
        QuantFormat.GGUF_Q8_0: Layout(34, _run(8 * (2 + small), bits=8), 0, is_code_signed=True),
        QuantFormat.GGUF_Q4_0: Layout(18, legacy(2), 0, bias=8),
        QuantFormat.GGUF_Q4_1: Layout(20, legacy(4), 0, 2, adds=True),
        QuantFormat.GGUF_Q5_0: Layout(22, fifth(legacy(6), 2), 0, bias=16),
        QuantFormat.GGUF_Q5_1: Layout(24, fifth(legacy(8), 4), 0, 2, adds=True),
        QuantFormat.GGUF_Q4_K: Layout(144, k4, 0, 2, scales, minimums),
        QuantFormat.GGUF_Q5_K: Layout(176, k5, 0, 2, scales, minimums),
        QuantFormat.GGUF_Q6_K: Layout(210, _q6_codes(), 208, scales=six, bias=32, is_scale_signed=True),
    }


def _run(first: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Numbers whose bits lie side by side."""
    return first[:, None] + torch.arange(bits)


def _k_nibbles(start: int) -> torch.Tensor:
    """32 bytes hold two groups of 32: one in the low nibbles, one in the high ones."""
    e = torch.arange(256)
    return _run(8 * (start + e // 64 * 32 + e % 32) + 4 * (e // 32 % 2), bits=4)


def _k_fifth() -> torch.Tensor:
    """Byte 16 + i holds the fifth bit of element i of each group, group by group."""
    e = torch.arange(256)
    return (8 * (16 + e % 32) + e // 32)[:, None]


def _k_scales() -> tuple[torch.Tensor, torch.Tensor]:
    """Six bits each: groups 0..3 at the low end of bytes 4..7 (minimums 8..11); of groups 4..7 four bits in a nibble of
    bytes 12..15 and the upper two at the high end of bytes 4..7 (8..11)."""
    g, pair = torch.arange(4), torch.arange(2)
    tables = []
    for start, nibble in ((4, 0), (8, 4)):
        low = _run(8 * (start + g), bits=6)
        high = torch.cat((_run(8 * (12 + g) + nibble, bits=4), (8 * (start + g) + 6)[:, None] + pair), dim=1)
        tables.append(torch.cat((low, high)))
    return tables[0], tables[1]


def _q6_codes() -> torch.Tensor:
    """Of each 128 elements, quarters 0 and 1 in the low nibbles of 64 bytes, 2 and 3 in the high ones; 32 bytes hold
    the upper two bits, a quarter in each pair."""
    e = torch.arange(256)
    half, quarter, i = e // 128, e // 32 % 4, e % 32
    low = _run(8 * (64 * half + 32 * (quarter % 2) + i) + 4 * (quarter // 2), bits=4)
    return torch.cat((low, _run(8 * (128 + 32 * half + i) + 2 * quarter, bits=2)), dim=1)
