"""AWQ checkpoints, as AutoAWQ's "gemm" version packs them.

    X.qweight  int32 [K, N / 8]     eight output columns in a word, interleaved:
                                    bits   0  4  8 12 16 20 24 28
                                    column 0  2  4  6  1  3  5  7
    X.qzeros   int32 [K / g, N / 8] likewise
    X.scales   fp16  [K / g, N]

    weight[n, k] = (code[k, n] - zero[k / g, n]) * scale[k / g, n]

Source: Lin et al. 2023 (AWQ), and the layout of AutoAWQ's WQLinear_GEMM. Which layers are quantised is read from the
files: a layer on `modules_to_not_convert` has a plain weight there, whatever the list calls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.quant.layer import SCALES, WORDS, Files, StoredLayer, by_weight
from octavo.core.quant.settings import Settings

_INERT = {
    "quant_method": "chose this reader",
    "backend": "another runtime's kernels",
    "do_fuse": "another runtime's modules",
    "fuse_max_seq_len": "another runtime's modules",
    "modules_to_fuse": "another runtime's modules",
    "exllama_config": "another runtime's kernels",
    "q_group_size": "an older name beside group_size",
    "w_bit": "an older name beside bits",
    "sym": "of GPTQ, whose fields newer writers add",
    "act_group_aware": "of GPTQ",
    "damp_percent": "how codes were found",
    "true_sequential": "how codes were found",
    "cache_block_outputs": "how codes were found",
    "batch_size": "how codes were found",
    "dataset": "how codes were found",
    "tokenizer": "how codes were found",
    "model_seqlen": "how codes were found",
    "meta": "provenance",
}


def awq_layers(files: Files, config: Mapping[str, Any]) -> dict[str, StoredLayer]:
    """The quantised layers of an AWQ checkpoint, by the name of their weight.

    Raises:
        CheckpointError: the config asks for what is not implemented, or shapes contradict it.
    """
    settings = Settings(config)
    bits = settings.integer("bits", config.get("w_bit"))
    if bits != 4:
        raise settings.refuse("bits", "AWQ is read with 4 bits")
    for name in ("version", "format"):
        settings.choice(name, ("gemm",), "gemm")
    if not settings.flag("zero_point", True):
        raise settings.refuse("zero_point", "AWQ is read with zero points")
    group_size = settings.integer("group_size", config.get("q_group_size"), low=-1)
    settings.strings("modules_to_not_convert")
    settings.finish(_INERT)
    return by_weight(_AwqLayer(files, name, group_size) for name in files.layers_with("qweight"))


class _AwqLayer(StoredLayer):
    kind = "AWQ int4"

    def __init__(self, files: Files, name: str, group_size: int) -> None:
        super().__init__(files, name, {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES})
        columns, words = files.matrix(f"{name}.qweight")
        self.shape = (words * 8, columns)
        self._scheme = QuantScheme(QuantFormat.INT4, max(group_size, 0), symmetric=False)
        groups = self._scheme.scale_shape(*self.shape)[1]
        self._check("qzeros", (groups, words))
        self._check("scales", (groups, words * 8))

    @property
    def scheme(self) -> QuantScheme:
        return self._scheme

    def read(self) -> QuantizedTensor:
        return QuantizedTensor(
            self._scheme,
            _unpack(self._read("qweight")).T.contiguous().view(torch.int8),
            self._scales("scales", transposed=True),
            _unpack(self._read("qzeros")).T.contiguous(),
        )


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [R, N / 8] -> codes uint8 [R, N], columns in order.

    Of a word's bytes 0 to 3, byte 2 h + b holds columns 4 b + h (low nibble) and 4 b + 2 + h (high nibble).
    """
    rows, width = words.shape
    data = words.reshape(-1).view(torch.uint8).view(rows, width, 2, 2).transpose(2, 3)  # [R, W, b, h]
    out = torch.empty(rows, width, 2, 2, 2, dtype=torch.uint8)  # [R, W, b, nibble, h]
    torch.bitwise_and(data, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(data, 4, out=out[..., 1, :])
    return out.view(rows, -1)
