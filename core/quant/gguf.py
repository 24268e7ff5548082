"""Quantised tensors of a GGUF file, kept as the file's own blocks where the device multiplies them.

    blk.0.ffn_up.weight, Q4_K blocks [rows, row bytes]  ──►  …layers.0.mlp.up_proj.weight, a QuantizedTensor of them

What no product multiplies stays with the file's own reader, which dequantises by many threads. So do tables that are
only looked up; the token embedding is kept as blocks, since many models multiply by it, too: it serves as their output
head. The layout of the blocks is known to `core/backend/blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.quant.layer import ANY_DTYPE, Files, StoredLayer, by_weight

_FORMATS = {quant_format.name.removeprefix("GGUF_"): quant_format for quant_format in QuantFormat if quant_format.block}
"""The formats by their GGUF names. Never written to."""

TOKEN_EMBEDDING = "embed_tokens"
"""The last part of the name of the table that may be the output head, too."""


def gguf_layers(files: Files, multiplies: Callable[[QuantScheme], bool]) -> dict[str, StoredLayer]:
    """The layers that are kept as blocks, by the name of their weight.

    Args:
        files: of a GGUF checkpoint.
        multiplies: whether the device has a product for weights of a scheme.
    """
    kept = {quant_format for quant_format in _FORMATS.values() if multiplies(QuantScheme(quant_format))}
    found = ((name, _FORMATS.get(files.dtype(f"{name}.weight"))) for name in files.layers_with("weight"))
    return by_weight(
        _BlockLayer(files, name, quant_format)
        for name, quant_format in found
        if quant_format in kept and len(files.shape(f"{name}.weight")) == 2 and not _is_table(name.rsplit(".", 1)[-1])
    )


def _is_table(last: str) -> bool:
    """Whether a layer of this name, its last part, is only looked up."""
    return "embed" in last and last != TOKEN_EMBEDDING


class _BlockLayer(StoredLayer):
    def __init__(self, files: Files, name: str, quant_format: QuantFormat) -> None:
        super().__init__(files, name, {"weight": ANY_DTYPE})
        self.shape = files.matrix(f"{name}.weight")
        self.kind = files.dtype(f"{name}.weight")
        self._format = quant_format

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(self._format)

    def read(self) -> QuantizedTensor:
        return QuantizedTensor.of_blocks(self._format, self._read("weight"))
