"""gpt-oss checkpoints: the experts of a layer stacked, in MXFP4.

    …experts.gate_up_proj_blocks  uint8 [E, 2 I, G, 16]    32 codes of a row in 16 bytes, the low nibble first
    …experts.gate_up_proj_scales  uint8 [E, 2 I, G]        scale = 2^(byte - 127)
    …experts.down_proj_blocks     uint8 [E, M, G, 16]      likewise

    ──►  …experts.{e}.gate_up_proj.weight [2 I, 32 G],  …experts.{e}.down_proj.weight [M, 32 G], for each expert e

Rows keep the file's order; which of them are gates is the model's affair. Source: the OCP Microscaling Formats
specification v1.0, 5.3.3 and 5.4 (e2m1, e8m0), and the names that Hugging Face's gpt-oss has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from octavo.core.backend.quant import MXFP4_GROUP, QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.bits import unpack_nibbles
from octavo.core.quant.layer import Files, StoredLayer, by_weight
from octavo.core.quant.settings import Settings

_HALF_OF_SMALLEST_NORMAL = 1 << 22
"""The bits of 2^-127 in fp32, which is subnormal."""
_NOT_A_NUMBER = 0x7FC00000
_INERT = {
    "quant_method": "chose this reader",
    "modules_to_not_convert": "shows in the files",
    "dequantize": "another runtime's choice",
}


def mxfp4_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The experts of an MXFP4 checkpoint as one layer each, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, or shapes contradict each other.
    """
    Settings(config).finish(_INERT)
    return by_weight(expert for stacked in _stacked_names(files) for expert in _experts(files, stacked))


def _stacked_names(files: Files) -> list[str]:
    """Names of stacked weights, such as "model.layers.0.mlp.experts.gate_up_proj"."""
    return [f"{name}.{part}" for part in ("gate_up_proj", "down_proj") for name in files.layers_with(f"{part}_blocks")]


def _experts(files: Files, stacked: str) -> Iterator[StoredLayer]:
    shape = files.shape(f"{stacked}_blocks")
    if len(shape) != 4 or shape[3] * 2 != MXFP4_GROUP:
        raise CheckpointError(
            f"{files.path}: {stacked}_blocks has shape {list(shape)}, not [experts, rows, groups, {MXFP4_GROUP // 2}]",
            field=f"{stacked}_blocks",
        )
    files.check_shape(f"{stacked}_scales", shape[:3])
    for part in ("blocks", "scales"):
        files.check_dtype(f"{stacked}_{part}", ("U8",))
    for expert in range(shape[0]):
        yield _Expert(files, stacked, expert, (shape[1], shape[2] * MXFP4_GROUP))


class _Expert(StoredLayer):
    kind = "MXFP4"

    def __init__(self, files: Files, stacked: str, expert: int, shape: tuple[int, int]) -> None:
        module, projection = stacked.rsplit(".", 1)
        super().__init__(files, f"{module}.{expert}.{projection}", {})
        self.tensors = (f"{stacked}_blocks", f"{stacked}_scales")
        self.shape = shape
        self._expert = expert

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(QuantFormat.MXFP4, MXFP4_GROUP)

    def read(self) -> QuantizedTensor:
        blocks, exponents = (self._files.read(name)[self._expert] for name in self.tensors)
        return QuantizedTensor(self.scheme, unpack_nibbles(blocks).flatten(1), power_of_two(exponents))


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Scales in fp32 of e8m0 bytes: 2^(byte - 127), and NaN for 255."""
    bits = exponents.to(torch.int32) << 23  # the byte is the exponent of an fp32, but for its two ends
    bits.masked_fill_(exponents == 0, _HALF_OF_SMALLEST_NORMAL)
    return bits.masked_fill_(exponents == 255, _NOT_A_NUMBER).view(torch.float32)
