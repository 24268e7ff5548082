"""Device slots of low-rank adapters, part by part, and how layers add them to their products.

    one part (one checkpoint layer; its members are one, or the local experts of a module list)

        slot          0       1       …  max_loras - 1
        a_LRK     [ A ▓▓░ | A ▓▓▓ |   …  ]     ░: zeros, up to max_lora_rank
        b_LNR     [ B ▓▓░ | B ▓▓▓ |   …  ]     L = slots · members; member m of slot s: s · members + m
        scales_L  [ scale | scale |   …  ]     0 where the slot's adapter lacks the layer

    qkv product   x ──► W ─────────────────► out [ q  |  k  |  v ]
                  x ──► q_proj's A, B ── += ───────┘           │
                  x ──► v_proj's A, B ── += ───────────────────┘     k_proj: no adapter has it, no memory, no call

A part gets memory when the first adapter that has the layer is loaded, and keeps it. Layers hold what `AdapterSlots`
gave them when they were built, and call `add` in a step; `AdapterSlots` alone fills slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.backend.specs import LoraSpec
from octavo.core.parallel.mesh import Range


@dataclass(frozen=True, slots=True, eq=False)
class LoraWeights:
    """One layer of one adapter on the host: out += scale * (x @ a.T) @ b.T.

    Attributes:
        a_RK, b_NR: as the file stores them, or cut to what this rank holds.
        scale: lora_alpha / rank, or / sqrt(rank).
    """

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """R."""
        return self.a_RK.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of both matrices."""
        return self.a_RK.nbytes + self.b_NR.nbytes


PartKind = Literal["linear", "embedding", "head", "router", "expert"]
"""What a layer is: target_modules "all-linear" means "linear" ones alone."""


@dataclass(frozen=True, slots=True)
class PartShape:
    """A checkpoint layer as the model registers it.

    Attributes:
        names: its name in the checkpoint, without ".weight"; several where one part stacks the experts of a list.
        rows, in_features: N and K of the checkpoint's tensor.
        kept_rows: the row ranges that this rank holds, in the order of its product; None: all.
        kept_columns: the inputs that this rank holds; None: all.
        kind: "embedding" is a table [V, M] that ids look up: its K is V, its N is M.
        elsewhere: further names of a list of experts, which other ranks hold.
    """

    names: tuple[str, ...]
    rows: int
    in_features: int
    kept_rows: tuple[Range, ...] | None = None
    kept_columns: Range | None = None
    kind: PartKind = "linear"
    elsewhere: tuple[str, ...] = ()

    @property
    def row_ranges(self) -> tuple[Range, ...]:
        """The rows that this rank holds."""
        return ((0, self.rows),) if self.kept_rows is None else self.kept_rows

    @property
    def column_range(self) -> Range:
        """The inputs that this rank holds."""
        return (0, self.in_features) if self.kept_columns is None else self.kept_columns

    @property
    def local_rows(self) -> int:
        """N on this rank."""
        return sum(stop - start for start, stop in self.row_ranges)

    @property
    def local_inputs(self) -> int:
        """K on this rank."""
        start, stop = self.column_range
        return stop - start

    def cut(self, weights: LoraWeights, dtype: torch.dtype) -> LoraWeights:
        """What this rank holds of a layer's weights: columns of A, rows of B; the sum over ranks is the whole."""
        start, stop = self.column_range
        pieces = [weights.b_NR[first:last] for first, last in self.row_ranges]
        b_NR = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return LoraWeights(_own(weights.a_RK[:, start:stop], dtype), _own(b_NR, dtype), weights.scale)


def _own(piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A contiguous copy that keeps nothing else alive, neither a file's map nor a larger tensor."""
    return torch.empty(piece.shape, dtype=dtype).copy_(piece)


class LoraPart:
    """The slots of one part.

    Args:
        shape: of the layer.
        backend, opset: where it runs.
        dtype: of the slots; that of the product's inputs.
        num_slots, max_rank: of every part.
    """

    def __init__(
        self,
        shape: PartShape,
        backend: DeviceBackend,
        opset: OpSet,
        *,
        dtype: torch.dtype,
        num_slots: int,
        max_rank: int,
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._backend = backend
        self._opset = opset
        self._num_slots = num_slots
        self._max_rank = max_rank
        self._filled: set[int] = set()
        self._a_LRK: torch.Tensor
        self._b_LNR: torch.Tensor
        self._scales_L: torch.Tensor
        self._lora_gemm: Callable[..., None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has memory: some adapter that has the layer was loaded."""
        return self._lora_gemm is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the slots; 0 until an adapter has the layer."""
        return self.slot_bytes if self.is_ready else 0

    @property
    def slot_bytes(self) -> int:
        """Bytes that the slots take once they are there."""
        stacked = self._num_slots * len(self.shape.names)
        matrices = self._max_rank * (self._depth + self.shape.local_rows) * self.dtype.itemsize
        return stacked * (matrices + 4)

    @property
    def spec(self) -> LoraSpec:
        """Of the op that `add` calls."""
        return LoraSpec(self._depth, self.shape.local_rows, self._max_rank, self.dtype)

    def make_ready(self) -> None:
        """Allocate empty slots and bind the op; again: nothing."""
        if self.is_ready:
            return
        shape, rank = self.shape, self._max_rank
        stacked = self._num_slots * len(shape.names)
        self._a_LRK = self._backend.empty(stacked, rank, self._depth, dtype=self.dtype).zero_()
        self._b_LNR = self._backend.empty(stacked, shape.local_rows, rank, dtype=self.dtype).zero_()
        self._scales_L = self._backend.empty(stacked, dtype=torch.float32).zero_()
        self._lora_gemm = self._opset.bind("lora_gemm", self.spec)

    def fill(self, slot: int, members: dict[int, LoraWeights]) -> None:
        """Put an adapter's layers, cut to this rank, into a slot; members that it lacks become zeros."""
        for member in range(len(self.shape.names)):
            index = slot * len(self.shape.names) + member
            if (weights := members.get(member)) is not None:
                self._put(index, weights)
            elif index in self._filled:
                self._clear(index)

    def add(self, x_TK: torch.Tensor, adapter_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, N] += the adapters' share; adapter_T [T] int32: slot · members + member of each row, or -1."""
        assert self._lora_gemm is not None  # asked for by whoever holds the part
        if x_TK.dtype != self.dtype:
            x_TK = x_TK.to(self.dtype)
        self._lora_gemm(x_TK, self._a_LRK, self._b_LNR, self._scales_L, adapter_T, out=out)

    @property
    def _depth(self) -> int:
        return self.shape.local_inputs

    def _put(self, index: int, weights: LoraWeights) -> None:
        rank, from_host = weights.rank, self._backend.from_host
        self._put_a(index, weights.a_RK)
        b_NR = torch.zeros(weights.b_NR.shape[0], self._max_rank, dtype=self.dtype)
        b_NR[:, :rank] = weights.b_NR
        from_host(b_NR, out=self._b_LNR[index])
        from_host(torch.tensor([weights.scale], dtype=torch.float32), out=self._scales_L[index : index + 1])
        self._filled.add(index)

    def _put_a(self, index: int, a_RK: torch.Tensor) -> None:
        rank = a_RK.shape[0]
        self._backend.from_host(a_RK, out=self._a_LRK[index, :rank])
        self._a_LRK[index, rank:].zero_()

    def _clear(self, index: int) -> None:
        self._a_LRK[index].zero_()
        self._b_LNR[index].zero_()
        self._scales_L[index].zero_()
        self._filled.discard(index)


class ProductAdapters:
    """The adapters of one product, which may fuse several parts.

    Args:
        parts: in the order of the product's columns.
    """

    def __init__(self, parts: Sequence[LoraPart]) -> None:
        self._parts: list[tuple[LoraPart, slice]] = []
        start = 0
        for part in parts:
            stop = start + part.shape.local_rows
            self._parts.append((part, slice(start, stop)))
            start = stop

    def add(self, x_TK: torch.Tensor, adapter_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, N] += the adapters' share of the product of x [T, K], before a gate and before a sum over ranks."""
        for part, columns in self._parts:
            if part.is_ready:
                part.add(x_TK, adapter_T, out=out[:, columns])
