"""bitsandbytes checkpoints: LLM.int8, and nf4 or fp4 with its optional second quantisation of the scales.

    int8   X.weight  int8 [N, K]      X.SCB  fp32 [N]          weight[n, k] = code[n, k] * SCB[n] / 127

    4 bit  X.weight                   uint8 [N * K / 2, 1]     two codes in a byte, the high one first, row by row
           X.weight.quant_map         fp32 [16]                what each code means
           X.weight.absmax            fp32 [blocks]            one scale per `blocksize` elements of the flat weight
           X.weight.quant_state.bitsandbytes__nf4              JSON in bytes: shape, blocksize, nested_…
       with double quantisation
           X.weight.absmax            uint8 [blocks]           a code of nested_quant_map [256], times
           X.weight.nested_absmax     fp32 [nested blocks]     the scale of its own block, plus nested_offset

LLM.int8 multiplies the largest activations apart, in float; here all of them stay float, which is closer to the float
model, not farther. The 4-bit codes index a table of floats and no backend multiplies them, so they are dequantised.
Source: Dettmers et al. 2022 (LLM.int8), 2023 (QLoRA); the state that bitsandbytes writes beside its weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.quant.bits import unpack_nibbles
from octavo.core.quant.layer import ANY_DTYPE, INDICES, SCALES, Files, StoredLayer, by_weight
from octavo.core.quant.settings import Settings

_STATE = "weight.quant_state.bitsandbytes__"
_KINDS = ("nf4", "fp4")
_STORAGES = ("U8", "I8", "BF16", "F16", "F32")
"""What `bnb_4bit_quant_storage` may make of the packed bytes."""
_INERT = {
    "quant_method": "chose this reader",
    "_load_in_8bit": "shows in the files",
    "_load_in_4bit": "shows in the files",
    "load_in_8bit": "shows in the files",
    "load_in_4bit": "shows in the files",
    "bnb_4bit_compute_dtype": "another runtime's arithmetic",
    "bnb_4bit_quant_type": "told by each weight's own state",
    "bnb_4bit_use_double_quant": "told by each weight's own state",
    "bnb_4bit_quant_storage": "the bytes are the same",
    "llm_int8_threshold": "activations stay float",
    "llm_int8_skip_modules": "shows in the files",
    "llm_int8_enable_fp32_cpu_offload": "memory of another runtime",
    "llm_int8_has_fp16_weight": "training only",
}


def bitsandbytes_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantised layers of a bitsandbytes checkpoint, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, or shapes contradict it.
    """
    Settings(config).finish(_INERT)
    layers: list[StoredLayer] = [_Int8Layer(files, name) for name in files.layers_with("SCB")]
    for kind in _KINDS:
        layers += [_FourBitLayer(files, name, kind) for name in files.layers_with(_STATE + kind)]
    return by_weight(layers)


class _Int8Layer(StoredLayer):
    kind = "LLM.int8"

    def __init__(self, files: Files, name: str) -> None:
        super().__init__(files, name, {"weight": ANY_DTYPE, "SCB": SCALES, "weight_format": ("U8", "I8", *INDICES)})
        self.shape = files.matrix(f"{name}.weight")
        self._check("SCB", (self.shape[0],))
        if files.dtype(f"{name}.weight") != "I8":
            raise self._fault("weight", f"is stored as {files.dtype(f'{name}.weight')}, but has int8 scales (SCB)")
        if self._has("weight_format"):
            self._check("weight_format", (), (1,))

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(QuantFormat.INT8)

    def read(self) -> QuantizedTensor:
        if self._has("weight_format") and int(self._read("weight_format")) != 0:
            raise self._fault("weight_format", "is not 0: only weights stored by rows can be read")
        return QuantizedTensor(self.scheme, self._read("weight"), self._scales("SCB").div(127).view(-1, 1))


class _FourBitLayer(StoredLayer):
    def __init__(self, files: Files, name: str, kind: str) -> None:
        self._state_name = _STATE + kind
        parts = {"weight": _STORAGES, self._state_name: ("U8",), "weight.absmax": ANY_DTYPE}
        tables = ("weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
        super().__init__(files, name, {**parts, **dict.fromkeys(tables, SCALES)})
        self.kind = f"bitsandbytes {kind}"
        self._check("weight.quant_map", (16,))
        files.vector(f"{name}.weight.absmax")
        if self._has("weight.nested_absmax"):
            files.vector(f"{name}.weight.nested_absmax")
            self._check("weight.nested_quant_map", (256,))
            files.check_dtype(f"{name}.weight.absmax", ("U8",))

    @property
    def scheme(self) -> None:
        return None

    @cached_property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]  # told by the state, which is first read when asked
        return self._state[0]

    @cached_property
    def _state(self) -> tuple[tuple[int, int], Mapping[str, Any]]:
        try:
            state = json.loads(bytes(self._read(self._state_name).tolist()))
            rows, columns = (int(side) for side in state["shape"])
            counts = (rows, columns, state["blocksize"], state.get("nested_blocksize", 1))
            float(state["nested_offset"] if self._has("weight.nested_absmax") else 0)
            if not all(isinstance(count, int) and count > 0 for count in counts):
                raise ValueError(f"its sizes are {counts}")
        except (ValueError, KeyError, TypeError) as error:
            raise self._fault(self._state_name, f"is no state of a [N, K] weight ({error})") from error
        return (rows, columns), state

    def read(self) -> torch.Tensor:
        (rows, columns), state = self._state
        data = self._read("weight").contiguous().view(torch.uint8).view(-1)
        if len(data) * 2 != rows * columns + rows * columns % 2:
            raise self._fault("weight", f"has {len(data)} bytes, which {rows} x {columns} codes of 4 bits do not fill")
        values = _two_by_byte(self._scales("weight.quant_map"), data)[: rows * columns]
        scales = self._absmax(state)
        block = state["blocksize"]
        if len(scales) != -(-len(values) // block):
            raise self._fault("weight.absmax", f"has {len(scales)} scales for {len(values)} codes in blocks of {block}")
        whole = len(values) // block * block
        values[:whole].view(-1, block).mul_(scales[: whole // block, None])
        values[whole:].mul_(scales[-1:])
        return values.view(rows, columns)

    def _absmax(self, state: Mapping[str, Any]) -> torch.Tensor:
        """The scales of all blocks, fp32; those of the second quantisation undone."""
        stored = self._read("weight.absmax")
        if not self._has("weight.nested_absmax"):
            if stored.dtype != torch.float32:
                raise self._fault("weight.absmax", f"is {stored.dtype}, but there is no nested_absmax to scale it")
            return self._scales("weight.absmax")
        table, scales = self._scales("weight.nested_quant_map"), self._scales("weight.nested_absmax")
        blocks = torch.arange(len(stored)) // state["nested_blocksize"]
        if len(scales) != int(blocks[-1]) + 1:
            raise self._fault("weight.nested_absmax", f"has {len(scales)} scales for {len(stored)} codes")
        return table[stored.to(torch.int32)] * scales[blocks] + float(state["nested_offset"])


def _two_by_byte(table: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """What the two codes of each byte mean; a table of pairs by byte halves the look-ups."""
    pairs = table[unpack_nibbles(torch.arange(256, dtype=torch.uint8)[:, None], high_first=True).to(torch.int32)]
    return torch.nn.functional.embedding(data.to(torch.int32), pairs).view(-1)
