"""What a rank holds of the layers that one product stacks, cut from them as their checkpoint stores them.

    checkpoint layer [N, K]  ── format.part ──►  plain, or codes  ── rows, columns ──►  pieces  ──►  weight.place

Codes can be cut where blocks that share scales begin, and by columns only where these lie in their original order; a
packed weight takes blocks of rows only where its own blocks begin. Whether all of that holds is tried out on tensors
without storage, by the very rules that cut and place the real ones; where it does not, the weight is plain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from octavo.core.backend.opset import OpSet
from octavo.core.backend.quant import QuantizedTensor, QuantScheme
from octavo.core.backend.specs import GemmSpec, GroupedGemmSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.parallel.mesh import Range
from octavo.core.quant.formats import LinearFormat

Piece = torch.Tensor | QuantizedTensor
Product = TypeVar("Product", GemmSpec, GroupedGemmSpec)


@dataclass(frozen=True, slots=True)
class PartCut:
    """What a rank holds of one checkpoint layer.

    Attributes:
        name: of the layer.
        shape: N and K of its tensor in the checkpoint.
        ranges: the rows kept, in their order in the product's weight.
        columns: the inputs kept.
    """

    name: str
    shape: tuple[int, int]
    ranges: tuple[Range, ...]
    columns: Range

    def pieces(self, weight_NK: Piece) -> Iterator[Piece]:
        """The ranges of rows, each with the kept columns. ValueError: codes can't be cut there."""
        for start, stop in self.ranges:
            yield columns_of(rows_of(weight_NK, start, stop), *self.columns)

    @property
    def cuts_columns(self) -> bool:
        """Whether other ranks hold some of the inputs."""
        return self.columns != (0, self.shape[1])


def stored_product(context: LayerContext, plain: Product, cuts: Sequence[PartCut]) -> tuple[Product, LinearFormat]:
    """A product's spec with its weight as stored; the plain one where nothing else can be multiplied, cut and placed.

    Args:
        context: the model's.
        plain: the product with a plain weight of this rank's size.
        cuts: the layers that the weight stacks, in the order of their rows.
    """
    stored = context.formats.linear([cut.name for cut in cuts])
    scheme = None if stored.scheme is None else multiplied_scheme(context.opset, plain, stored.scheme)
    if scheme is None:
        return plain, stored.as_plain()
    spec = _with_scheme(plain, scheme)
    return (spec, stored) if can_be_placed(spec.weight, stored, cuts) else (plain, stored.as_plain())


def multiplied_scheme(opset: OpSet, plain: Product, scheme: QuantScheme) -> QuantScheme | None:
    """The scheme in which the backend multiplies such a weight: as it is, with float activations, or None: in none.

    A backend without a product for the codes gets the weight dequantised, in the storage dtype of plain weights; and
    where it has none for quantised activations these keep their precision, since nothing is gained by losing it.
    """
    for asked in (scheme, replace(scheme, activation=None, activation_group_size=0)):
        if opset.keeps_codes(_with_scheme(plain, asked)):
            return asked
    return None


def _with_scheme(plain: Product, scheme: QuantScheme) -> Product:
    return replace(plain, weight=replace(plain.weight, scheme=scheme))


def can_be_placed(weight: WeightSpec, stored: LinearFormat, cuts: Sequence[PartCut]) -> bool:
    """Whether the pieces of quantised layers can be cut and placed as they are."""
    assert weight.scheme is not None
    if stored.input_order is not None and any(cut.cuts_columns for cut in cuts):
        return False
    offset = 0
    try:
        for cut in cuts:
            for piece in cut.pieces(_without_storage(weight.scheme, cut.shape)):
                weight.check_part(piece, offset)
                offset += piece.shape[0]
    except ValueError:
        return False
    return True


def _without_storage(scheme: QuantScheme, shape: tuple[int, int]) -> QuantizedTensor:
    rows, columns = shape
    block = scheme.format.block
    width = columns if block is None else columns // block.elements * block.num_bytes
    scales = torch.empty(scheme.scale_shape(rows, columns), device="meta")
    codes = torch.empty(rows, width, dtype=scheme.format.code_dtype, device="meta")
    return QuantizedTensor(scheme, codes, scales, None if scheme.symmetric else scales)


def rows_of(weight_NK: Piece, start: int, stop: int) -> Piece:
    """Rows start .. stop - 1 of a part; the part itself where that is all of it."""
    if (start, stop) == (0, weight_NK.shape[0]):
        return weight_NK
    return weight_NK[start:stop] if isinstance(weight_NK, torch.Tensor) else weight_NK.rows(start, stop)


def columns_of(weight_NK: Piece, start: int, stop: int) -> Piece:
    """Columns start .. stop - 1 of a part; the part itself where that is all of it."""
    if (start, stop) == (0, weight_NK.shape[1]):
        return weight_NK
    if isinstance(weight_NK, torch.Tensor):
        return weight_NK[:, start:stop].contiguous()
    return weight_NK.columns(start, stop)
