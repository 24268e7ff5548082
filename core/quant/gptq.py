"""GPTQ checkpoints, as AutoGPTQ and GPTQModel pack them.

    X.qweight  int32 [K * bits / 32, N]     a stream of codes down each column, see `bits.unpack_stream`
    X.qzeros   int32 [G, N * bits / 32]     a stream along each row; version 1 stores zero - 1, version 2 the zero
    X.scales   fp16  [G, N]
    X.g_idx    int32 [K]                    the group of each column k; absent: k / group_size

    weight[n, k] = (code[k, n] - zero[g_idx[k], n]) * scale[g_idx[k], n]

With act-order ("desc_act") g_idx runs to and fro. Sorting the columns by their group gives groups of equal size again:
the weight is read in that order, which `input_order` tells; x is gathered by it. Where sorted groups are not of equal
size the weight is dequantised. Codes of 2 and 3 bits are held as 4-bit ones, which hold them without loss.

A zero point of 0 wraps to the largest code in version 1, so the 1 is added modulo 2^bits (GPTQModel issue 2350).

Source: Frantar et al. 2022 (GPTQ); the layout of AutoGPTQ's QuantLinear. Which layers are quantised is read from the
files; `dynamic` may give some of them their own bits and groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.bits import signed, unpack_stream
from octavo.core.quant.layer import INDICES, SCALES, WORDS, ColumnGroups, Files, StoredLayer, StoredWeight, by_weight
from octavo.core.quant.settings import Settings

_INERT = {
    "quant_method": "chose this reader",
    "damp_percent": "how codes were found",
    "damp_auto_increment": "how codes were found",
    "true_sequential": "how codes were found",
    "static_groups": "shows in g_idx",
    "act_group_aware": "how codes were found",
    "mse": "how codes were found",
    "dataset": "how codes were found",
    "tokenizer": "how codes were found",
    "batch_size": "how codes were found",
    "cache_block_outputs": "how codes were found",
    "model_seqlen": "how codes were found",
    "pad_token_id": "how codes were found",
    "block_name_to_quantize": "shows in the files",
    "module_name_preceding_first_block": "shows in the files",
    "modules_in_block_to_quantize": "shows in the files",
    "modules_to_not_convert": "shows in the files",
    "lm_head": "shows in the files",
    "model_name_or_path": "provenance",
    "model_file_base_name": "provenance",
    "meta": "provenance",
    "backend": "another runtime's kernels",
    "use_cuda_fp16": "another runtime's kernels",
    "use_exllama": "another runtime's kernels",
    "disable_exllama": "another runtime's kernels",
    "exllama_config": "another runtime's kernels",
    "max_input_length": "another runtime's kernels",
    "offload_to_disk": "memory of the quantiser",
    "offload_to_disk_path": "memory of the quantiser",
}


@dataclass(frozen=True, slots=True)
class _Numbers:
    """How a layer's codes are made."""

    bits: int
    group_size: int
    act_order: bool
    symmetric: bool
    zero_offset: int


def gptq_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantised layers of a GPTQ checkpoint, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, or shapes contradict it.
    """
    settings = Settings(config)
    version = settings.choice("checkpoint_format", ("gptq", "gptq_v2"), config.get("format") or "gptq")
    settings.choice("format", ("gptq", "gptq_v2"), version)
    settings.choice("pack_dtype", ("int32",), "int32")
    settings.flag("is_marlin_format", False)
    if config.get("is_marlin_format"):
        raise settings.refuse("is_marlin_format", "weights packed for one kernel can't be read; take the GPTQ files")
    numbers = _read_numbers(settings, None, 0 if version == "gptq_v2" else 1)
    exceptions = settings.sections("dynamic")
    settings.finish(_INERT)
    return by_weight(
        _GptqLayer(files, name, _numbers_of(name, numbers, exceptions)) for name in files.layers_with("qweight")
    )


def _read_numbers(settings: Settings, default: _Numbers | None, zero_offset: int) -> _Numbers:
    """The numbers of a config, or of one of its exceptions, which takes what it does not name from `default`."""
    bits = settings.integer("bits", default.bits if default else None)
    if bits not in (2, 3, 4, 8):
        raise settings.refuse("bits", "2, 3, 4 and 8 can be loaded")
    group_size = settings.integer("group_size", default.group_size if default else -1, low=-1)
    act_order = settings.flag("desc_act", default.act_order if default else False)
    symmetric = settings.flag("sym", default.symmetric if default else True)
    return _Numbers(bits, max(group_size, 0), act_order, symmetric, zero_offset)


def _numbers_of(name: str, numbers: _Numbers, exceptions: Mapping[str, Settings]) -> _Numbers:
    """A layer's numbers: those of the first pattern of `dynamic` that matches the beginning of its name.

    A pattern may begin with "+:"; one with "-:" names layers that are left plain.
    """
    for pattern, settings in exceptions.items():
        try:
            matches = re.match(pattern.removeprefix("+:").removeprefix("-:"), name)
        except re.error as error:
            raise CheckpointError(
                f"config.json: dynamic: {pattern!r} is no pattern ({error})", field="dynamic"
            ) from error
        if not matches:
            continue
        if pattern.startswith("-:"):
            raise CheckpointError(
                f"config.json: dynamic excludes {name} by {pattern!r}, but the files hold it quantised; the config "
                "belongs to other files",
                field="dynamic",
            )
        own = _read_numbers(settings, numbers, numbers.zero_offset)
        settings.finish(_INERT)
        return own
    return numbers


class _GptqLayer(StoredLayer):
    def __init__(self, files: Files, name: str, numbers: _Numbers) -> None:
        super().__init__(files, name, {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES, "g_idx": INDICES})
        words, rows = files.matrix(f"{name}.qweight")
        bits = numbers.bits
        if words * 32 % bits or rows * bits % 32:
            raise self._fault("qweight", f"has shape {[words, rows]}, which codes of {bits} bits can't fill")
        self.shape = (rows, words * 32 // bits)
        self.kind = f"GPTQ int{bits}"
        self._numbers = numbers
        held = QuantFormat.INT8 if bits == 8 else QuantFormat.INT4
        self._even_scheme = QuantScheme(held, numbers.group_size, symmetric=numbers.symmetric)
        self._num_groups = self._even_scheme.scale_shape(*self.shape)[1]
        self._check("scales", (self._num_groups, rows))
        self._check("qzeros", (self._num_groups, rows * bits // 32))
        if numbers.act_order or self._has("g_idx"):
            self._check("g_idx", (self.shape[1],))

    @property
    def scheme(self) -> QuantScheme | None:
        return self._even_scheme if self._columns is None or self._columns.is_even else None

    @property
    def input_order(self) -> torch.Tensor | None:
        return None if self._columns is None or not self._columns.is_even else self._columns.order_K

    @cached_property
    def _columns(self) -> ColumnGroups | None:
        """None where the config says that columns lie in order: g_idx is then checked only when they are read."""
        return self._read_groups() if self._numbers.act_order else None

    def read(self) -> StoredWeight:
        columns = self._columns
        if columns is None and self._has("g_idx") and not self._read_groups().is_plain:
            raise self._fault("g_idx", "orders the columns, but quantization_config.desc_act is false")
        codes_NK, zeros_NG = self._read_codes()
        scales_NG = self._scales("scales", transposed=True)
        if columns is not None and not columns.is_even:
            zeros_NK = 0 if zeros_NG is None else zeros_NG.to(torch.float32)[:, columns.group_K]
            return (codes_NK.to(torch.float32) - zeros_NK) * scales_NG[:, columns.group_K]
        if columns is not None and columns.order_K is not None:
            codes_NK = codes_NK.index_select(1, columns.order_K)
        return QuantizedTensor(self._even_scheme, codes_NK, scales_NG, zeros_NG)

    def _read_codes(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes [N, K], int8, and their zero points [N, G]; None when these are all in the middle."""
        bits, middle = self._numbers.bits, 1 << (self._numbers.bits - 1)
        codes = unpack_stream(self._read("qweight").T, bits)
        stored_zeros = unpack_stream(self._read("qzeros"), bits).T.to(torch.int16)
        zeros = stored_zeros + self._numbers.zero_offset & (1 << bits) - 1
        if self._numbers.symmetric:
            if not bool((zeros == middle).all()):
                raise self._fault("qzeros", f"are not all {middle}, but quantization_config.sym is true")
            return signed(codes, bits), None
        if bits == 8:  # as signed codes; the difference to the zero point stays the same
            return signed(codes, 8), (zeros - 128).contiguous()
        return codes.view(torch.int8), zeros.contiguous()

    def _read_groups(self) -> ColumnGroups:
        try:
            return ColumnGroups.of(self._read("g_idx"), self._numbers.group_size, self._num_groups)
        except ValueError as error:
            raise self._fault("g_idx", f"{error}; the file is damaged") from error
