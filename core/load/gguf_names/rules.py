"""What becomes of a layer's tensors: each rule turns one of them, or two that belong together, into Hugging Face's.

    Same             one tensor, one name
    Pairs            rows of heads whose rotary pairs lie side by side
    Sections         q, k and v in one tensor -> three
    Experts          [E, N, K] -> E tensors, each a slice: never are all of them widened at once
    ExpertPairs      two such, gate and up -> E tensors, rows in turn
    ElementPairs     two plain tensors, elements in turn
    Heads            [H, D] -> H vectors
    LatentPair       transposed keys and values of latent attention -> one tensor

`name` may hold {} for the number of an expert or head. Only the tables and `names.py` talk to this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import TensorInfo
from octavo.core.load.gguf_names.views import (
    Halves,
    InTurn,
    LatentKeysValues,
    View,
    elements_of,
    num_rows,
    rows_of,
    whole,
)

Views = Iterator[tuple[str, View]]


class Rule(Protocol):
    """One line of a table."""

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """Names within the layer, and what they are made of.

        Args:
            tensors: the tensor, or those that belong together.
            config: config.json's fields.

        Raises:
            CheckpointError: shapes contradict the config.
        """
        ...


@dataclass(frozen=True, slots=True)
class Same:
    """One tensor under another name; `as_row`: a vector that Hugging Face has as a matrix of one row."""

    name: str
    as_row: bool = False

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        del config
        (tensor,) = tensors
        is_vector = self.as_row and len(tensor.shape) == 1
        yield self.name, whole(tensor, shape=(1, *tensor.shape) if is_vector else None)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows (head, pair, half), put back into (head, half, pair); `heads` is the field with the number of heads."""

    name: str
    heads: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        (tensor,) = tensors
        rows, heads = tensor.shape[0], config[self.heads]
        if rows % (2 * heads) or num_rows(tensor) != rows:
            raise _contradiction(tensor, f"has {rows} rows, which {heads} heads can't share evenly")
        yield self.name, whole(tensor, order=Halves(heads))


@dataclass(frozen=True, slots=True)
class Sections:
    """q, k and v in one tensor, one after the other."""

    names: tuple[str, str, str] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        (tensor,) = tensors
        query, key = (config[field] * config["head_dim"] for field in ("num_attention_heads", "num_key_value_heads"))
        counts = (query, key, key)
        if tensor.shape[0] != sum(counts) or num_rows(tensor) != tensor.shape[0]:
            raise _contradiction(tensor, f"has {tensor.shape[0]} rows where q, k and v have {sum(counts)}")
        first = 0
        for name, count in zip(self.names, counts, strict=True):
            yield name, View((count, *tensor.shape[1:]), (rows_of(tensor, first, count),))
            first += count


@dataclass(frozen=True, slots=True)
class Experts:
    """A matrix of each expert."""

    name: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        (tensor,) = tensors
        rows = _rows_of_each(tensor, 3)
        for expert in range(tensor.shape[0]):
            yield self.name.format(expert), View(tensor.shape[1:], (rows_of(tensor, expert * rows, rows),))


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """A matrix of each expert, its rows in turn from the two tensors."""

    name: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        one, other = _alike(tensors)
        rows = _rows_of_each(one, 3)
        shape = (2 * one.shape[1], one.shape[2])
        for expert in range(one.shape[0]):
            pieces = tuple(rows_of(tensor, expert * rows, rows) for tensor in (one, other))
            yield self.name.format(expert), View(shape, pieces, InTurn())


@dataclass(frozen=True, slots=True)
class ElementPairs:
    """The elements of two plain tensors in turn, along the last axis."""

    name: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        one, other = _alike(tensors)
        if one.type.block_elements > 1 or other.type.block_elements > 1:
            raise _contradiction(one, f"is stored as {one.type.name}, which biases never are")
        shape = (*one.shape[:-1], 2 * one.shape[-1])
        yield self.name, View(shape, (elements_of(one), elements_of(other)), InTurn())


@dataclass(frozen=True, slots=True)
class Heads:
    """A vector of each head."""

    name: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        (tensor,) = tensors
        _rows_of_each(tensor, 2)
        for head in range(tensor.shape[0]):
            yield self.name.format(head), View(tensor.shape[1:], (rows_of(tensor, head, 1),))


@dataclass(frozen=True, slots=True)
class LatentPair:
    """Keys [H, C, K] and values [H, V, C] of latent attention: one tensor [H · (K + V), C]."""

    name: str

    def views(self, tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> Views:
        """See `Rule`."""
        keys, values = tensors
        _rows_of_each(keys, 3)
        if len(values.shape) != 3 or (keys.shape[0], keys.shape[1]) != (values.shape[0], values.shape[2]):
            raise _contradiction(values, f"has shape {list(values.shape)} beside keys of {list(keys.shape)}")
        heads, latent, key_dim = keys.shape
        pieces = tuple(rows_of(tensor, 0, num_rows(tensor)) for tensor in (keys, values))
        yield self.name, View((heads * (key_dim + values.shape[1]), latent), pieces, LatentKeysValues(heads))


def _rows_of_each(tensor: TensorInfo, num_dims: int) -> int:
    """Rows of each of the tensors that are stacked along the first axis."""
    if len(tensor.shape) != num_dims:
        raise _contradiction(tensor, f"has shape {list(tensor.shape)}, not {num_dims} dimensions")
    return num_rows(tensor) // tensor.shape[0]


def _alike(tensors: Sequence[TensorInfo]) -> Sequence[TensorInfo]:
    one, other = tensors
    if one.shape != other.shape:
        raise _contradiction(other, f"has shape {list(other.shape)} beside {one.name} of {list(one.shape)}")
    return tensors


def _contradiction(tensor: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(f"tensor {tensor.name} {what}; the file is damaged", field=tensor.name)
