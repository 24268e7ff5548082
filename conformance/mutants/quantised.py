"""Faults of quantised weights: scales, zero points, minimums and bits that a kernel packs or reads wrongly.

place(part) ──► placed(change): the part as the broken kernel took it, or its plain values ──► the honest weight
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, Wrap, around
from octavo.conformance.oracle import gguf
from octavo.core.backend import QuantFormat, QuantizedTensor

GROUP_K = 128


def placed(change: Callable[[QuantizedTensor], QuantizedTensor | torch.Tensor]) -> Wrap:
    """A weight that packs quantised parts wrongly; `change` gives the part as it was taken, or its plain values."""

    @around
    def prepare(honest: Op, call: Call) -> Any:
        weight = honest(**call)
        place = weight.place

        def place_wrongly(part: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
            place(change(part) if isinstance(part, QuantizedTensor) else part, row_offset)

        weight.place = place_wrongly
        return weight

    return prepare


def granularity_mistaken(part: QuantizedTensor) -> QuantizedTensor:
    """One scale per row is read as one per block of 128 rows; one per 128 columns as one per row."""
    if part.scheme.group_size == 0:
        rows = torch.arange(part.scales.shape[0]) // GROUP_K
        return replace(part, scales=part.scales[rows])
    if part.scheme.group_size == GROUP_K:
        return replace(part, scales=part.scales[:, :1].expand(part.scales.shape))
    return part


def zero_points_every_64(part: QuantizedTensor) -> QuantizedTensor:
    """Zero points are fetched once for 64 columns: at a group size of 32 every other group has its neighbour's."""
    if part.scheme.format is not QuantFormat.INT4 or part.scheme.group_size != 32 or part.zero_points is None:
        return part
    groups = torch.arange(part.zero_points.shape[1]) // 2 * 2
    return replace(part, zero_points=part.zero_points[:, groups])


def zero_points_less_one(part: QuantizedTensor) -> QuantizedTensor:
    """Zero points are stored less one in 4 bits, so that 0 comes back as 16."""
    if part.scheme.format is not QuantFormat.INT4 or part.zero_points is None:
        return part
    stored = (part.zero_points.to(torch.int64) - 1) & 0xF
    return replace(part, zero_points=stored + 1)


def groups_of_128(part: QuantizedTensor) -> QuantizedTensor | torch.Tensor:
    """The loop over a group ends after 128 columns: the second half of a group of 256 is left out."""
    if part.scheme.group_size != 256:
        return part
    plain = part.dequantize()
    plain[:, torch.arange(plain.shape[1]) % 256 >= 128] = 0
    return plain


def blocks_by_row(part: QuantizedTensor) -> QuantizedTensor | torch.Tensor:
    """The scales of blocks are read as one per row, from the beginning of their memory on."""
    if part.scheme.block_rows == 1:
        return part
    flat = part.scales.flatten()
    rows = torch.arange(part.shape[0]) % len(flat)
    return part.codes_NK.float() * flat[rows, None]


def blocks_transposed(part: QuantizedTensor) -> QuantizedTensor:
    """The scale of block (i, j) is read from where (j, i) lies in a transposed copy's memory."""
    if part.scheme.block_rows == 1:
        return part
    rows, columns = part.scales.shape
    return replace(part, scales=part.scales.flatten().view(columns, rows).T.contiguous())


def exponent_off_by_one(part: QuantizedTensor) -> QuantizedTensor:
    """The bias of MXFP4's exponents is taken for 128."""
    return replace(part, scales=part.scales / 2) if part.scheme.format is QuantFormat.MXFP4 else part


def sign_lost(part: QuantizedTensor) -> QuantizedTensor:
    """Three bits of a code are looked up."""
    return replace(part, codes_NK=part.codes_NK & 7) if part.scheme.format is QuantFormat.MXFP4 else part


def with_fields(change: Callable[[gguf.Layout, gguf.Fields], gguf.Fields]) -> Wrap:
    """A kernel that takes other numbers from the blocks than they hold."""

    def decode(part: QuantizedTensor) -> QuantizedTensor | torch.Tensor:
        if part.scheme.format.block is None:
            return part
        layout = gguf.layouts()[part.scheme.format]
        numbers = change(layout, gguf.fields(layout, part.codes_NK.reshape(-1, layout.num_bytes)))
        return gguf.values(layout, numbers).reshape(part.shape).float()

    return placed(decode)


def minimum_ignored(_: gguf.Layout, numbers: gguf.Fields) -> gguf.Fields:
    return replace(numbers, dmin=None)


def scale_stale(layout: gguf.Layout, numbers: gguf.Fields) -> gguf.Fields:
    """Every other group of a K block is scaled by the group's before it."""
    if numbers.scales is None:
        return numbers
    return replace(numbers, scales=numbers.scales[:, torch.arange(layout.groups) // 2 * 2])


def high_bits_dropped(layout: gguf.Layout, numbers: gguf.Fields) -> gguf.Fields:
    """Of 5 and 6 bits only the nibble is taken."""
    return replace(numbers, codes=numbers.codes % 16) if layout.codes.shape[1] in (5, 6) else numbers


MUTANTS = (
    Mutant(
        "row-scales-as-block-scales",
        "one scale per row is read as one per block of 128, and the other way round",
        "8-bit GEMM called with the scales of another scheme",
        "prepare_weight",
        placed(granularity_mistaken),
    ),
    Mutant(
        "int4-zero-point-stale-at-32",
        "groups of 32: every other group is unpacked with its neighbour's zero point",
        "4-bit kernels that fetch zero points once for 64 columns",
        "prepare_weight",
        placed(zero_points_every_64),
    ),
    Mutant(
        "int4-zero-point-wrapped",
        "zero points are stored less one, and 0 wraps to 16",
        "checkpoint formats that store zero points less one",
        "prepare_weight",
        placed(zero_points_less_one),
    ),
    Mutant(
        "group-size-256",
        "groups of 256: the second half of each group is left out",
        "quantised kernels with a fixed largest group",
        "prepare_weight",
        placed(groups_of_128),
    ),
    Mutant(
        "block-scales-as-row-scales",
        "the scales of blocks of 128 x 128 are read as one per row",
        "8-bit GEMM called with the scales of another scheme",
        "prepare_weight",
        placed(blocks_by_row),
    ),
    Mutant(
        "block-scales-transposed",
        "the grid of block scales is read transposed",
        "block-scaled GEMM that wants its scales with the columns outermost",
        "prepare_weight",
        placed(blocks_transposed),
    ),
    Mutant(
        "mxfp4-exponent-off-by-one",
        "the scales' exponents are read with a bias of 128",
        "kernels that add a scale's exponent to that of their float type",
        "prepare_weight",
        placed(exponent_off_by_one),
    ),
    Mutant(
        "mxfp4-sign-lost",
        "codes are looked up by three of their four bits",
        "4-bit float kernels with a table of sizes",
        "prepare_weight",
        placed(sign_lost),
    ),
    Mutant(
        "gguf-minimum-ignored",
        "the minimums of a GGUF block are ignored",
        "kernels written for the symmetric formats first",
        "prepare_weight",
        with_fields(minimum_ignored),
    ),
    Mutant(
        "gguf-scale-stale",
        "K blocks: every other group is scaled by its neighbour's scale",
        "kernels that fetch a sub-block's scale once for 64 elements",
        "prepare_weight",
        with_fields(scale_stale),
    ),
    Mutant(
        "gguf-high-bits-dropped",
        "formats of five and six bits: only the low nibble is taken",
        "kernels that share the unpacking of the 4-bit formats",
        "prepare_weight",
        with_fields(high_bits_dropped),
    ),
)
