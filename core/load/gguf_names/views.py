"""One Hugging Face tensor as pieces of a GGUF file's tensors.

    View ── shape, order
      └── Piece ── tensor, first unit, number of units, elements of a unit

    units of the pieces  ──order──►  rows of the tensor

A unit is a row, or one element where a single element can be taken out. Most orders move whole units, and whole units
are whole blocks, so a quantised tensor is put in order while it is still packed. Nothing here reads a file, and numpy
is imported when a tensor is read, not when a file is opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from octavo.core.load.gguf_file import TensorInfo

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Units = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` units of a tensor, from unit `first` on; a unit has `unit_elements` elements."""

    tensor: TensorInfo
    first: int
    count: int
    unit_elements: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit as stored."""
        kind = self.tensor.type
        return self.unit_elements // kind.block_elements * kind.block_bytes

    @property
    def start(self) -> int:
        """First byte, from the start of the file."""
        return self.tensor.start + self.first * self.unit_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.count * self.unit_bytes


class Order(Protocol):
    """How the units of the pieces become the rows of one tensor."""

    moves_units: ClassVar[bool]
    """Whether units stay whole, so that packed ones can be moved."""

    def arrange(self, pieces: Sequence[Units]) -> Units:
        """The units [count, unit] of each piece, in the tensor's order."""
        ...


@dataclass(frozen=True, slots=True)
class InOrder:
    """The one piece as it is."""

    moves_units: ClassVar[bool] = True

    def arrange(self, pieces: Sequence[Units]) -> Units:
        """See `Order`."""
        return pieces[0]


@dataclass(frozen=True, slots=True)
class Halves:
    """Rows of heads: (head, pair, half) -> (head, half, pair). Undoes what GGUF's llama writers do to q and k."""

    moves_units: ClassVar[bool] = True

    heads: int

    def arrange(self, pieces: Sequence[Units]) -> Units:
        """See `Order`."""
        (units,) = pieces
        count, width = units.shape
        return units.reshape(self.heads, count // self.heads // 2, 2, width).swapaxes(1, 2).reshape(count, width)


@dataclass(frozen=True, slots=True)
class InTurn:
    """Two pieces, a unit of each in turn."""

    moves_units: ClassVar[bool] = True

    def arrange(self, pieces: Sequence[Units]) -> Units:
        """See `Order`."""
        import numpy as np

        return np.stack(pieces, axis=1).reshape(-1, pieces[0].shape[1])


@dataclass(frozen=True, slots=True)
class LatentKeysValues:
    """Keys [heads · C, K], transposed within a head, and values [heads · V, C] -> rows (head, K then V) of C.

    GGUF keeps the two apart, so that a program that absorbs them into its queries needs no transposition.
    """

    moves_units: ClassVar[bool] = False

    heads: int

    def arrange(self, pieces: Sequence[Units]) -> Units:
        """See `Order`."""
        import numpy as np

        keys, values = (units.reshape(self.heads, -1, units.shape[1]) for units in pieces)
        return np.concatenate((keys.swapaxes(1, 2), values), axis=1).reshape(-1, values.shape[2])


@dataclass(frozen=True, slots=True)
class View:
    """One tensor, by Hugging Face's shape (rows first)."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    order: Order = InOrder()

    @property
    def is_packed(self) -> bool:
        """Whether it can be put in order as it is stored; otherwise its elements must be widened first."""
        return self.order.moves_units and len({piece.tensor.type for piece in self.pieces}) == 1

    @property
    def type_name(self) -> str:
        """How it is stored; F32 where it can only be read widened."""
        return self.pieces[0].tensor.type.name if self.is_packed else "F32"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return sum(piece.num_bytes for piece in self.pieces)


def whole(tensor: TensorInfo, *, shape: tuple[int, ...] | None = None, order: Order | None = None) -> View:
    """A whole tensor, perhaps in another order of its rows, or under another shape of as many elements."""
    return View(shape or tensor.shape, (rows_of(tensor, 0, num_rows(tensor)),), order or InOrder())


def rows_of(tensor: TensorInfo, first: int, count: int) -> Piece:
    """Some rows of a tensor, all dimensions but the last taken as one; of a vector, some elements."""
    return Piece(tensor, first, count, tensor.shape[-1] if len(tensor.shape) > 1 else tensor.type.block_elements)


def num_rows(tensor: TensorInfo) -> int:
    """How many units `rows_of` counts."""
    count = 1
    for dim in tensor.shape[:-1]:
        count *= dim
    return count if len(tensor.shape) > 1 else tensor.shape[0] // tensor.type.block_elements


def elements_of(tensor: TensorInfo) -> Piece:
    """All elements of a plain tensor, one by one."""
    count: Any = 1
    for dim in tensor.shape:
        count *= dim
    return Piece(tensor, 0, int(count), 1)
