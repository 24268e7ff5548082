"""Weights in 8-bit floats with scales beside them, as DeepSeek, AutoFP8 and FBGEMM store them.

    X.weight            fp8 e4m3  [N, K]
    X.weight_scale_inv  fp32 or bf16 [ceil(N / 128), ceil(K / 128)]   DeepSeek-V3: a scale per block, multiplied on
    X.weight_scale      fp32  [] or [1]                               AutoFP8: one per tensor
                        fp32  [N, 1]                                  FBGEMM: one per row
    X.input_scale       fp32  [] or [1]                               AutoFP8, static activations: not used

    weight[n, k] = code[n, k] * scale[n / 128, k / 128]

Activations are quantised as the scheme of the file says: in groups of 128 for blocks, else per token. A static
activation scale is a calibrated guess of what is measured here per token; products take none (docs/quantization.md), so
it is passed over. Source: the DeepSeek-V3 technical report (3.3.2); AutoFP8's and Hugging Face's readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.quant.layer import SCALES, Files, StoredLayer, by_weight
from octavo.core.quant.settings import Settings

FP8_DTYPE = "F8_E4M3"
"""What safetensors calls e4m3fn."""
_SCALE_DTYPES = (*SCALES, "F8_E8M0")

_INERT = {
    "quant_method": "chose this reader",
    "modules_to_not_convert": "shows in the files",
    "ignored_layers": "shows in the files",
    "modules_to_convert": "shows in the files",
    "kv_cache_scheme": "of no weight; kv_scheme.py reads it",
    "scale_fmt": "which values the scales were rounded to",
    "activation_scale_ub": "a bound on activations' scales, which are measured here",
    "dequantize": "another runtime's choice",
}


def fp8_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantised layers of a native fp8 checkpoint, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, or shapes contradict it.
    """
    settings = Settings(config)
    settings.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.choice("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.choice("expert_dtype", ("fp8",), "fp8")
    blocks = read_block_shape(settings, "weight_block_size")
    settings.finish(_INERT)
    names = [name for name in files.layers_with("weight") if files.dtype(f"{name}.weight") == FP8_DTYPE]
    return by_weight(_Fp8Layer(files, name, blocks) for name in names)


def read_block_shape(settings: Settings, name: str) -> tuple[int, int] | None:
    """Rows and columns of the blocks that share a scale; None where the field is absent.

    Raises:
        CheckpointError: it is no pair of positive integers.
    """
    value = settings.any_of(name)
    if value is None:
        return None
    valid = isinstance(value, list | tuple) and len(value) == 2
    if not valid or not all(isinstance(side, int) and not isinstance(side, bool) and side > 0 for side in value):
        raise settings.refuse(name, "give the rows and columns of a block")
    return value[0], value[1]


def block_scheme(blocks: tuple[int, int]) -> QuantScheme:
    """Blocks of the weight, and groups as wide of the activations."""
    block_rows, block_columns = blocks
    fp8 = QuantFormat.FP8_E4M3FN
    return QuantScheme(fp8, block_columns, activation=fp8, block_rows=block_rows, activation_group_size=block_columns)


class _Fp8Layer(StoredLayer):
    kind = "fp8"

    def __init__(self, files: Files, name: str, blocks: tuple[int, int] | None) -> None:
        parts = ("weight_scale_inv", "weight_scale", "input_scale", "activation_scale")
        super().__init__(files, name, {"weight": (FP8_DTYPE,), **dict.fromkeys(parts, _SCALE_DTYPES)})
        self.shape = files.matrix(f"{name}.weight")
        self._scale_name = "weight_scale" if self._has("weight_scale") else "weight_scale_inv"
        self._scheme = self._find_scheme(blocks)

    @property
    def scheme(self) -> QuantScheme:
        return self._scheme

    def read(self) -> QuantizedTensor:
        scales = self._scales(self._scale_name).view(self._scheme.scale_shape(*self.shape))
        return QuantizedTensor(self._scheme, self._read("weight"), scales)

    def _find_scheme(self, blocks: tuple[int, int] | None) -> QuantScheme:
        fp8 = QuantFormat.FP8_E4M3FN
        if blocks is not None:
            scheme = block_scheme(blocks)
            self._check(self._scale_name, scheme.scale_shape(*self.shape))
            return scheme
        rows = self.shape[0]
        self._check(self._scale_name, (), (1,), (1, 1), (rows, 1), (rows,))
        per_tensor = self._files.shape(f"{self.name}.{self._scale_name}") in ((), (1,), (1, 1))
        return QuantScheme(fp8, -1 if per_tensor else 0, activation=fp8)
