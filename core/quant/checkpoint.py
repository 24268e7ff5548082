"""A checkpoint whose quantised layers read as one weight each, whatever tensors a file keeps them in.

    files:   X.qweight X.qzeros X.scales   Y.weight   X.bias
                 │                            │          │
    names(): X.weight                     Y.weight     X.bias        read(): QuantizedTensor, or what the files hold

Models' targets stay as they are for plain files. `open_quantized` alone makes one. It holds no weight: each read builds
one from the files, so that memory peaks at the model's own weights plus the largest tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.core.backend.quant import QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.formats import LinearFormat
from octavo.core.quant.kv_scheme import KVScheme
from octavo.core.quant.layer import StoredLayer, StoredWeight

if TYPE_CHECKING:
    from octavo.core.load.checkpoint import Checkpoint, CheckpointFormat


class QuantizedCheckpoint:
    """See `Checkpoint` in core/load. Its config is that of the same model without quantisation.

    Args:
        files: the opened files; closed with this.
        layers: the quantised layers, by the names of their weights.
        made: what the weights are made of beyond the files; part of the fingerprint.
    """

    def __init__(self, files: Checkpoint, layers: Mapping[str, StoredLayer], *, made: str = "") -> None:
        self._files = files
        self._layers = dict(layers)
        self._made = made
        owners: dict[str, list[str]] = {}
        for weight, layer in layers.items():
            for part in layer.tensors:
                owners.setdefault(part, []).append(weight)
        self._owners = owners
        self._names = _logical_names(files.names(), owners)
        self.config: Mapping[str, Any] = {k: v for k, v in files.config.items() if k != "quantization_config"}

    @property
    def path(self) -> Path:
        return self._files.path

    @property
    def format(self) -> CheckpointFormat:
        return self._files.format

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._files.generation_config

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._files.metadata

    @property
    def norm_weights_include_one(self) -> bool:
        return self._files.norm_weights_include_one

    @property
    def total_bytes(self) -> int:
        return self._files.total_bytes

    @property
    def fingerprint(self) -> str:
        return self._files.fingerprint + (f"-{self._made}" if self._made else "")

    def names(self) -> tuple[str, ...]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._layers[name].shape if name in self._layers else self._files.shape(name)

    def stored_dtype(self, name: str) -> str:
        return self._layers[name].kind if name in self._layers else self._files.stored_dtype(name)

    def stored_bytes(self, name: str) -> int:
        if name not in self._layers:
            return self._files.stored_bytes(name)
        return sum(self._files.stored_bytes(part) // len(self._owners[part]) for part in self._layers[name].tensors)

    def read(self, name: str, out: torch.Tensor | None = None) -> StoredWeight:
        if name not in self._layers:
            return self._files.read(name, out)
        layer = self._layers[name]
        return layer.read() if out is None else out.copy_(layer.read_plain())

    def read_stored(self, name: str) -> torch.Tensor:
        return self._files.read_stored(name)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, StoredWeight]]:
        for name in self.names() if names is None else names:
            yield name, self.read(name)

    def tokenizer_files(self) -> Mapping[str, Path]:
        return self._files.tokenizer_files()

    def close(self) -> None:
        self._files.close()


def _logical_names(stored: Iterable[str], owners: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The stored names with each layer's tensors replaced, where the first of them stands, by its weight."""
    names: dict[str, None] = {}
    for name in stored:
        names.update(dict.fromkeys(owners.get(name, (name,))))
    return tuple(names)


class StoredFormats:
    """The formats of a quantised checkpoint's layers (`WeightFormats`).

    Args:
        layers: by the names of their weights; a layer that is not among them is plain.
        kv_scheme: what the checkpoint says of the KV cache.
        mixes: parts of one product may be plain beside quantised ones, as in GGUF files, whose tensors each have a type
            of their own; the product is then plain. Elsewhere that is an error.
    """

    def __init__(
        self, layers: Mapping[str, StoredLayer], kv_scheme: KVScheme | None = None, *, mixes: bool = False
    ) -> None:
        self.kv_scheme = kv_scheme
        self._layers = dict(layers)
        self._mixes = mixes

    def linear(self, names: Sequence[str]) -> LinearFormat:
        stored = {name: layer for name in names if (layer := self._layers.get(f"{name}.weight")) is not None}
        if not stored or (self._mixes and len(stored) < len(names)):
            return LinearFormat()
        if len(stored) < len(names):
            plain = [name for name in names if name not in stored]
            raise CheckpointError(
                f"{', '.join(names)} are multiplied as one weight, but the checkpoint holds {', '.join(stored)} "
                f"quantised and {', '.join(plain)} plain; quantise or skip all of them",
                field=plain[0],
            )
        orders = {name: order for name, layer in stored.items() if (order := layer.input_order) is not None}
        scheme = _common_scheme([layer.scheme for layer in stored.values()])
        plain_format = LinearFormat(part_orders=orders)
        if scheme is None:
            return plain_format
        if not orders:
            return LinearFormat(scheme)
        first = next(iter(orders.values()))
        if len(orders) < len(names) or not all(torch.equal(order, first) for order in orders.values()):
            return plain_format
        return LinearFormat(scheme, first, orders)


def _common_scheme(schemes: Sequence[QuantScheme | None]) -> QuantScheme | None:
    """The scheme that all parts are stored by; None where they differ, or one is read plain."""
    first = schemes[0]
    if first is None or not all(scheme is not None and scheme.stores_like(first) for scheme in schemes):
        return None
    if all(scheme == first for scheme in schemes):
        return first
    return replace(first, activation=None, activation_group_size=0)
