"""One drawn instance of a case: host tensors with their roles, the op call, and the check of what came out.

    Trial ── tensors   given (read only) | wanted (written) | updated (read and written), with declared strides
          ├─ weights   parts to be placed into a PackedWeight
          ├─ pools     KV pools: named blocks in canonical NHD, everything else is poison
          ├─ run       calls the op on a Bench, by the names above
          └─ check     compares outputs with the oracle, from the host tensors alone

The candidate gets copies only. `check` closes over the host tensors and the oracle, runs after the candidate, and
where cases run in a worker process it runs in another process altogether.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from octavo.conformance.finding import Finding
from octavo.core.backend import GemmSpec, GroupedGemmSpec, KVCacheSpec, QuantizedTensor

if TYPE_CHECKING:
    from octavo.conformance.harness.bench import Bench

Outputs = Mapping[str, torch.Tensor]
"""Host copies by name: wanted and updated tensors; of a pool P what its written slots hold afterwards, in ascending
order of slots, as "P.key" [W, K, D] and "P.value" [W, K, Dv]."""


class Role(enum.Enum):
    GIVEN = "given"
    WANTED = "wanted"
    UPDATED = "updated"


@dataclass(frozen=True)
class HostTensor:
    """A tensor of the call as the host knows it.

    Attributes:
        data: contents; None for a wanted tensor.
        strides: in elements; gaps are poisoned. None: contiguous.
        offset: elements before the first.
        is_finite: a non-finite output value is a fault.
        may_be_zero: an output of zeros only is no fault.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: torch.Tensor | None = None
    strides: tuple[int, ...] | None = None
    offset: int = 0
    is_finite: bool = True
    may_be_zero: bool = False


def given(name: str, data: torch.Tensor, *, strides: Sequence[int] | None = None, offset: int = 0) -> HostTensor:
    """An input; it must come back unchanged."""
    return HostTensor(name, Role.GIVEN, tuple(data.shape), data.dtype, data, _tuple(strides), offset)


def wanted(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    is_finite: bool = True,
    may_be_zero: bool = False,
) -> HostTensor:
    """An output, filled with poison beforehand; every element must be written."""
    return HostTensor(name, Role.WANTED, tuple(shape), dtype, None, _tuple(strides), offset, is_finite, may_be_zero)


def updated(
    name: str,
    data: torch.Tensor,
    *,
    strides: Sequence[int] | None = None,
    offset: int = 0,
    is_finite: bool = True,
    may_be_zero: bool = False,
) -> HostTensor:
    """An input that the op also writes."""
    return HostTensor(
        name, Role.UPDATED, tuple(data.shape), data.dtype, data, _tuple(strides), offset, is_finite, may_be_zero
    )


def row_strides(shape: Sequence[int], gap: int) -> tuple[int, ...]:
    """Strides of rows (last axis) that lie `gap` elements apart; the axes before are dense over them."""
    strides = [1]
    for axis in range(len(shape) - 1, 0, -1):
        strides.insert(0, strides[0] * shape[axis] + (gap if axis == len(shape) - 1 else 0))
    return tuple(strides)


@dataclass(frozen=True)
class HostWeight:
    """A weight as the loader would stream it: parts and the rows at which they start."""

    name: str
    spec: GemmSpec | GroupedGemmSpec
    parts: tuple[tuple[torch.Tensor | QuantizedTensor, int], ...]


Block = tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class HostPool:
    """A KV pool of one layer.

    Attributes:
        blocks: block id -> key [n, K, D] and value [n, K, Dv] of its first n slots; None or missing slots: poison.
        written: slots (block id * block_size + offset, in named blocks) that the op may change. Any other that changes
            is a fault, so `check` looks at these alone.
        pad_bytes: after each block, so that a block's stride is not its size.
        is_lazy: a pool too big to fill: only named blocks are touched, before and after.
    """

    name: str
    spec: KVCacheSpec
    num_blocks: int
    blocks: Mapping[int, Block]
    written: frozenset[int] = frozenset()
    pad_bytes: int = 0
    is_lazy: bool = False

    @property
    def block_ids(self) -> list[int]:
        """Named blocks, ascending."""
        return sorted(self.blocks)


@dataclass(frozen=True)
class Trial:
    """See the module's picture. In a group of ranks each has its own.

    Attributes:
        shared: outputs that must have the same bits on every rank of the group.
        is_empty: nothing is to be compared (no rows): the case only must not fail or touch anything.
    """

    tensors: tuple[HostTensor, ...]
    run: Callable[[Bench], None]
    check: Callable[[Outputs], list[Finding]]
    weights: tuple[HostWeight, ...] = ()
    pools: tuple[HostPool, ...] = field(default=())
    shared: frozenset[str] = frozenset()
    is_empty: bool = False


def _tuple(strides: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if strides is None else tuple(strides)
