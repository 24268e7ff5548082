"""Checkpoints of compressed-tensors (llm-compressor): groups of layers, each with its own numbers.

    config_groups  {"group_0": {targets, weights: {...}, input_activations: {...} | null, format}}
    ignore         layers that are left plain: names, "re:" patterns, classes

    pack-quantized                              int-, float-, naive-quantized
    X.weight_packed      int32 [N, K / p]       X.weight             int8 or fp8 e4m3 [N, K]
    X.weight_scale       [N, G]                 X.weight_scale       [N, G], [N, 1], [1] or [N / bn, K / bk]
    X.weight_zero_point  int32 [N / p, G]       X.weight_zero_point  int8, as the scales
    X.weight_shape       int64 [2]              X.input_scale        static activations: not used
    X.weight_g_idx       int32 [K], act-order

    A word holds p = 32 // bits codes, the first in its lowest bits, each moved up by 2^(bits - 1); zero points are
    packed down the rows of a column in the same way.       weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g]

Activations are quantised as the group says, scales measured per token (or group); static scales are passed over, and
where the group asks for zero points of activations, they stay float. Source: the documentation and the names of
compressed-tensors. Which layers are quantised is read from the files; the config gives each its numbers.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from octavo.core.backend.quant import QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.bits import leaves_bits_set, signed, unpack_words
from octavo.core.quant.compressed_config import Group, read_groups
from octavo.core.quant.layer import (
    ANY_DTYPE,
    INDICES,
    SCALES,
    WORDS,
    ColumnGroups,
    Files,
    StoredLayer,
    StoredWeight,
    by_weight,
)

_CODE_DTYPES = ("I8", "F8_E4M3")
_ZERO_DTYPES = ("I8", "I16", *INDICES)
_PARTS = {
    "weight_scale": SCALES,
    "weight_zero_point": ANY_DTYPE,
    "weight_shape": INDICES,
    "weight_g_idx": INDICES,
    "input_scale": SCALES,
    "input_zero_point": ANY_DTYPE,
}


def compressed_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantised layers of a compressed-tensors checkpoint, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, shapes contradict it, or the files hold a layer
            quantised that no group names.
    """
    groups = read_groups(config)
    packed = files.layers_with("weight_packed")
    unpacked = [name for name in files.layers_with("weight") if files.dtype(f"{name}.weight") in _CODE_DTYPES]
    layers: list[StoredLayer] = [_PackedLayer(files, name, groups.of_layer(name)) for name in packed]
    layers += [_UnpackedLayer(files, name, groups.of_layer(name)) for name in unpacked]
    return by_weight(layers)


class _CompressedLayer(StoredLayer):
    """What packed and unpacked layers have in common: scales, zero points and the order of columns."""

    def __init__(self, files: Files, name: str, group: Group, weight: str, codes: Sequence[str]) -> None:
        super().__init__(files, name, {weight: codes, **_PARTS})
        self._group = group
        self.kind = group.kind
        self.shape = self._find_shape()
        self._even_scheme = group.scheme
        self._grid = self._even_scheme.scale_shape(*self.shape)
        self._check("weight_scale", *self._grid_shapes())
        if self._has("weight_g_idx"):
            self._check("weight_g_idx", (self.shape[1],))
        if not group.symmetric:
            files.check_dtype(f"{name}.weight_zero_point", _ZERO_DTYPES)

    @abc.abstractmethod
    def _find_shape(self) -> tuple[int, int]:
        """N and K."""

    def _grid_shapes(self) -> list[tuple[int, ...]]:
        """How a file may shape one value per scale; a lone one or a column may lack axes."""
        rows, columns = self._grid
        return [self._grid, *([(rows,)] if columns == 1 else []), *([()] if self._grid == (1, 1) else [])]

    @property
    def scheme(self) -> QuantScheme | None:
        return self._even_scheme if self._columns is None or self._columns.is_even else None

    @property
    def input_order(self) -> torch.Tensor | None:
        return None if self._columns is None or not self._columns.is_even else self._columns.order_K

    @cached_property
    def _columns(self) -> ColumnGroups | None:
        if not self._has("weight_g_idx"):
            return None
        group_K = self._read("weight_g_idx")
        if bool((group_K == -1).all()):  # what the writer leaves where it never ordered columns
            return None
        try:
            return ColumnGroups.of(group_K, self._even_scheme.group_size, self._grid[1])
        except ValueError as error:
            raise self._fault("weight_g_idx", f"{error}; the file is damaged") from error

    @abc.abstractmethod
    def _read_zeros(self) -> torch.Tensor:
        """Zero points [N, G]."""

    def _zeros(self) -> torch.Tensor | None:
        """Zero points [N, G]; None for a symmetric group, whose files may hold some that are all 0."""
        if not self._has("weight_zero_point"):
            return None
        zeros = self._read_zeros()
        if not self._group.symmetric:
            return zeros
        if bool(zeros.to(torch.float32).any()) and bool(self._read("weight_zero_point").to(torch.float32).any()):
            raise self._fault("weight_zero_point", "is not all 0, but quantization_config says symmetric")
        return None

    def _finish(self, codes_NK: torch.Tensor, zeros_NG: torch.Tensor | None) -> StoredWeight:
        """The weight from its codes, in the order of their groups."""
        scales = self._scales("weight_scale").view(self._grid)
        columns = self._columns
        if columns is not None and not columns.is_even:
            zeros_NK = 0 if zeros_NG is None else zeros_NG.to(torch.float32)[:, columns.group_K]
            return (codes_NK.to(torch.float32) - zeros_NK) * scales[:, columns.group_K]
        if columns is not None and columns.order_K is not None:
            codes_NK = codes_NK.index_select(1, columns.order_K)
        return QuantizedTensor(self._even_scheme, codes_NK, scales, zeros_NG)


class _PackedLayer(_CompressedLayer):
    def __init__(self, files: Files, name: str, group: Group) -> None:
        if group.is_float or group.format not in ("pack-quantized", None):
            raise CheckpointError(
                f"{files.path}: {name}.weight_packed belongs to {group.kind} of format {group.format}; packed integers "
                "of format pack-quantized can be loaded",
                field="format",
            )
        super().__init__(files, name, group, "weight_packed", WORDS)
        rows, per_word = self.shape[0], 32 // group.bits
        self._check("weight_packed", (rows, -(-self.shape[1] // per_word)))
        if self._has("weight_zero_point"):
            packed_grid = [(-(-rows // per_word), self._grid[1])]
            self._check("weight_zero_point", *(packed_grid if self._zeros_are_packed else self._grid_shapes()))

    @property
    def _zeros_are_packed(self) -> bool:
        return self._files.dtype(f"{self.name}.weight_zero_point") in WORDS

    def _find_shape(self) -> tuple[int, int]:
        self._check("weight_shape", (2,))
        rows, columns = self._read("weight_shape").tolist()
        if rows < 1 or columns < 1:
            raise self._fault("weight_shape", f"is {[rows, columns]}; the file is damaged")
        return int(rows), int(columns)

    def read(self) -> StoredWeight:
        bits, words = self._group.bits, self._read("weight_packed")
        if leaves_bits_set(words, bits):
            raise self._fault("weight_packed", f"holds codes of more than the {bits} bits that num_bits tells")
        codes_NK = signed(unpack_words(words, bits, self.shape[1]), bits)
        return self._finish(codes_NK, self._zeros())

    def _read_zeros(self) -> torch.Tensor:
        """Older files have them unpacked."""
        stored = self._read("weight_zero_point")
        if not self._zeros_are_packed:
            return stored.view(self._grid)
        bits = self._group.bits
        return signed(unpack_words(stored.T.contiguous(), bits, self.shape[0]), bits).T.contiguous()


class _UnpackedLayer(_CompressedLayer):
    def __init__(self, files: Files, name: str, group: Group) -> None:
        wanted = "F8_E4M3" if group.is_float else "I8"
        found = files.dtype(f"{name}.weight")
        if found != wanted:
            raise CheckpointError(
                f"{files.path}: {name}.weight is stored as {found}, but its group is {group.kind}; the files belong to "
                "another config",
                field=f"{name}.weight",
            )
        super().__init__(files, name, group, "weight", _CODE_DTYPES)
        if self._has("weight_zero_point"):
            self._check("weight_zero_point", *self._grid_shapes())

    def _find_shape(self) -> tuple[int, int]:
        return self._files.matrix(f"{self.name}.weight")

    def read(self) -> StoredWeight:
        codes_NK, half = self._read("weight"), 1 << (self._group.bits - 1)
        if self._group.bits < 8 and bool(((codes_NK < -half) | (codes_NK >= half)).any()):
            raise self._fault("weight", f"holds codes of more than the {self._group.bits} bits that num_bits tells")
        return self._finish(codes_NK, self._zeros())

    def _read_zeros(self) -> torch.Tensor:
        return self._read("weight_zero_point").view(self._grid)
