"""One stored layer: the tensors of a file that make up one logical weight, and how to read them.

    file                                         models see
    X.qweight  X.qzeros  X.scales  X.g_idx  ──►  X.weight, a QuantizedTensor [N, K] (or a plain one)

Each format has its own class; `QuantizedCheckpoint` keeps them by logical name and alone calls `read`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.core.backend.quant import QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.core.load.checkpoint import Checkpoint

StoredWeight = torch.Tensor | QuantizedTensor

WORDS = ("I32",)
"""How packed codes are stored, by safetensors' names of dtypes."""
INDICES = ("I32", "I64")
SCALES = ("F32", "F16", "BF16")
ANY_DTYPE = ()


class Files:
    """The stored tensors of a checkpoint, as readers of quantised layers look at them. Only reads.

    Args:
        checkpoint: the opened files.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._known = frozenset(checkpoint.names())

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored. CheckpointError when there is no such tensor."""
        return self._checkpoint.shape(name)

    def dtype(self, name: str) -> str:
        """As the file names it: "I32", "F8_E4M3", …"""
        return self._checkpoint.stored_dtype(name)

    def read(self, name: str) -> torch.Tensor:
        """Its elements as stored; may be a view of the file."""
        return self._checkpoint.read_stored(name)

    def layers_with(self, suffix: str) -> list[str]:
        """The layers that have a tensor of this suffix, in file order."""
        ending = f".{suffix}"
        return [name.removesuffix(ending) for name in self._checkpoint.names() if name.endswith(ending)]

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor that must have two axes.

        Raises:
            CheckpointError: it has not.
        """
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, not two axes; the files are damaged", field=name
            )
        return shape[0], shape[1]

    def vector(self, name: str) -> int:
        """The length of a tensor that must have one axis, and something on it.

        Raises:
            CheckpointError: it has not.
        """
        shape = self.shape(name)
        if len(shape) != 1 or not shape[0]:
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(shape)}, not one axis; the files are damaged", field=name
            )
        return shape[0]

    def check_dtype(self, name: str, wanted: Sequence[str]) -> None:
        """Refuse a tensor that is stored as none of the wanted dtypes: its bytes would mean other numbers.

        Raises:
            CheckpointError: naming the tensor.
        """
        found = self.dtype(name)
        if found not in wanted:
            raise CheckpointError(
                f"{self.path}: {name} is stored as {found} where the format has {' or '.join(wanted)}; the files are "
                "damaged or belong to another quantization_config: download them again",
                field=name,
            )

    def check_shape(self, name: str, *wanted: tuple[int, ...]) -> None:
        """Refuse a tensor whose shape is none of the wanted ones, before anything is read.

        Raises:
            CheckpointError: naming the tensor; also when there is none of that name.
        """
        found = self.shape(name)
        if found not in wanted:
            shapes = " or ".join(str(list(shape)) for shape in wanted)
            raise CheckpointError(
                f"{self.path}: {name} has shape {list(found)} where the layer's other tensors and quantization_config "
                f"ask for {shapes}; the files are damaged or belong to another config",
                field=name,
            )


class StoredLayer(abc.ABC):
    """One logical weight.

    Args:
        files: where its tensors lie.
        name: of the layer, without ".weight".
        parts: the suffixes of the stored tensors that belong to it, with the dtypes that each may have (`ANY_DTYPE`:
            it has its own check); those that are not there are passed over.

    Attributes:
        shape: N and K.
        kind: how it is stored, for people.
        tensors: the stored tensors that belong to it.
    """

    shape: tuple[int, int]
    kind: str

    def __init__(self, files: Files, name: str, parts: Mapping[str, Sequence[str]]) -> None:
        self.name = name
        present = {full: dtypes for suffix, dtypes in parts.items() if (full := f"{name}.{suffix}") in files}
        for full, dtypes in present.items():
            if dtypes:
                files.check_dtype(full, dtypes)
        self.tensors = tuple(present)
        self._files = files

    @property
    @abc.abstractmethod
    def scheme(self) -> QuantScheme | None:
        """Of what `read` gives; None: a plain tensor."""

    @property
    def input_order(self) -> torch.Tensor | None:
        """The order [K] of the columns that `read` gives; None: the original one."""
        return None

    @abc.abstractmethod
    def read(self) -> StoredWeight:
        """The weight [N, K].

        Raises:
            CheckpointError: the stored tensors contradict each other.
        """

    def read_plain(self) -> torch.Tensor:
        """The weight [N, K] in fp32, its columns in the original order. CheckpointError as `read`."""
        return dequantized(self.read(), self.input_order)

    def _has(self, suffix: str) -> bool:
        return f"{self.name}.{suffix}" in self._files

    def _read(self, suffix: str) -> torch.Tensor:
        return self._files.read(f"{self.name}.{suffix}")

    def _scales(self, suffix: str, *, transposed: bool = False) -> torch.Tensor:
        """Scales in fp32, contiguous. CheckpointError where one of them is no number: a whole group would be none."""
        stored = self._read(suffix)
        values = (stored.T if transposed else stored).to(torch.float32).contiguous()
        if not bool(values.isfinite().all()):
            raise self._fault(suffix, "holds scales that are NaN or infinite; the file is damaged: download it again")
        return values

    def _check(self, suffix: str, *wanted: tuple[int, ...]) -> None:
        self._files.check_shape(f"{self.name}.{suffix}", *wanted)

    def _fault(self, suffix: str, reason: str) -> CheckpointError:
        name = f"{self.name}.{suffix}"
        return CheckpointError(f"{self._files.path}: {name} {reason}", field=name)


def by_weight(layers: Iterable[StoredLayer]) -> dict[str, StoredLayer]:
    """The layers by the names of their logical weights."""
    return {f"{layer.name}.weight": layer for layer in layers}


def dequantized(weight: StoredWeight, order_K: torch.Tensor | None) -> torch.Tensor:
    """A weight without codes, its columns put back where they were read in another order."""
    if not isinstance(weight, QuantizedTensor):
        return weight
    plain = weight.dequantize()
    if order_K is None:
        return plain
    restored = torch.empty_like(plain)
    restored[:, order_K] = plain
    return restored


@dataclass(frozen=True, slots=True)
class ColumnGroups:
    """The groups of a weight's columns where a tensor names each column's group (act-order).

    Attributes:
        group_K: the group of each column.
        order_K: the columns sorted by their group, stable; None where they lie so already.
        is_even: whether the sorted groups have the sizes that a group size tells.
    """

    group_K: torch.Tensor
    order_K: torch.Tensor | None
    is_even: bool

    @property
    def is_plain(self) -> bool:
        """Whether the groups are those that a group size alone tells."""
        return self.is_even and self.order_K is None

    @classmethod
    def of(cls, group_K: torch.Tensor, group_size: int, num_groups: int) -> ColumnGroups:
        """Sort columns by their groups, which must lie in 0 .. num_groups - 1 (ValueError). group_size 0: one group."""
        group_K = group_K.to(torch.int64)
        if len(group_K) and not 0 <= int(group_K.min()) <= int(group_K.max()) < num_groups:
            raise ValueError(f"names groups {int(group_K.min())} .. {int(group_K.max())} of {num_groups}")
        even_K = torch.arange(len(group_K)) // (group_size or max(len(group_K), 1))
        order_K = torch.argsort(group_K, stable=True)
        in_order = bool(torch.equal(order_K, torch.arange(len(group_K))))
        return cls(group_K, None if in_order else order_K, bool(torch.equal(group_K[order_K], even_K)))
