"""Quantising a plain checkpoint while it loads: `--quantization int8|int4|fp8`.

    int8   one scale per row, symmetric                                  scale = max |w| / 127
    int4   groups of 128 columns (64 or 32 where K asks for it), with zero points:
           scale = (max - min) / 15, zero = round(-min / scale); the range always holds 0
    fp8    e4m3fn, one scale per row                                     scale = max |w| / 448
           and activations per token, where the backend multiplies in fp8

Rounding is to nearest, without calibration. Embeddings, the output head, routers and whatever is no matrix stay as they
are: a head's error goes straight into the logits, a router's turns tokens to other experts, and both are a small share
of the bytes. int4 has zero points because they use all 16 codes: against symmetric codes with scale = max |w| / 7 the
error in groups of 128 is 14 % lower on normal weights and 19 % lower on Laplace's.

Weights are quantised one at a time, in pieces of rows, so that memory peaks at the model's own weights plus the largest
tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from octavo.core.backend.quant import QuantFormat, QuantizedTensor, QuantScheme
from octavo.core.quant.layer import ANY_DTYPE, Files, StoredLayer, by_weight

if TYPE_CHECKING:
    from octavo.core.load.checkpoint import Checkpoint

PLAIN_LAYERS = ("embed", "wte", "wpe", "router", "norm")
"""A layer with one of these in the last part of its name stays plain."""

PLAIN_NAMES = ("gate", "shared_expert_gate", "shared", "kv_b_proj")
"""As PLAIN_LAYERS, but the whole of the last part. Latent attention takes kv_b_proj apart and would undo its codes."""

PLAIN_MODULES = ("lm_head", "output", "output_layer", "embed_out", "score", "classifier", "pooler", "cls")
"""A layer that is, or lies in, a module of one of these names at the top of the model stays plain."""

_INT8_MAX, _INT4_MAX, _FP8_MAX = 127.0, 15.0, 448.0
_GROUP_SIZES = (128, 64, 32)
_CHUNK_ELEMENTS = 1 << 20
"""Rows are widened and quantised in pieces of about this size."""


def onload_layers(checkpoint: Checkpoint, kind: str) -> dict[str, StoredLayer]:
    """The layers of a plain checkpoint that are quantised as they are read, by the name of their weight.

    Args:
        checkpoint: plain, of any format.
        kind: a key of `KINDS`.
    """
    files = Files(checkpoint)
    names = (name for name in files.layers_with("weight") if is_quantised(name, files.shape(f"{name}.weight")))
    return by_weight(_QuantisedAtLoad(checkpoint, files, name, kind) for name in names)


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a layer of this name and weight is one of those that quantisation at load is for."""
    parts = name.split(".")
    if len(shape) != 2 or parts[-1] in PLAIN_NAMES or any(part in parts[-1] for part in PLAIN_LAYERS):
        return False
    return not any(part in PLAIN_MODULES for part in parts[:2])


def scheme_of(kind: str, in_features: int) -> QuantScheme:
    """The scheme of a weight of K = in_features."""
    if kind == "int8":
        return QuantScheme(QuantFormat.INT8)
    if kind == "fp8":
        return QuantScheme(QuantFormat.FP8_E4M3FN, activation=QuantFormat.FP8_E4M3FN)
    group_size = next((size for size in _GROUP_SIZES if in_features % size == 0), _GROUP_SIZES[-1])
    return QuantScheme(QuantFormat.INT4, group_size, symmetric=False)


def quantise(weight_NK: torch.Tensor, kind: str) -> QuantizedTensor:
    """A plain weight, quantised in pieces of rows."""
    (rows, columns), scheme = weight_NK.shape, scheme_of(kind, weight_NK.shape[1])
    grid = scheme.scale_shape(rows, columns)
    codes_NK = torch.empty(rows, columns, dtype=scheme.format.code_dtype)
    scales = torch.empty(grid)
    zeros = None if scheme.symmetric else torch.empty(grid, dtype=torch.int8)
    step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        codes_NK[piece], scales[piece], piece_zeros = KINDS[kind](weight_NK[piece].to(torch.float32))
        if zeros is not None and piece_zeros is not None:
            zeros[piece] = piece_zeros
    return QuantizedTensor(scheme, codes_NK, scales, zeros)


class _QuantisedAtLoad(StoredLayer):
    def __init__(self, checkpoint: Checkpoint, files: Files, name: str, kind: str) -> None:
        super().__init__(files, name, {"weight": ANY_DTYPE})
        self.shape = files.matrix(f"{name}.weight")
        self.kind = f"{files.dtype(f'{name}.weight')} to {kind}"
        self._checkpoint = checkpoint
        self._to = kind

    @property
    def scheme(self) -> QuantScheme:
        return scheme_of(self._to, self.shape[1])

    def read(self) -> QuantizedTensor:
        weight = self._checkpoint.read(f"{self.name}.weight")
        assert isinstance(weight, torch.Tensor), "a quantised checkpoint is refused before it comes here"
        return quantise(weight, self._to)


Pieces = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _to_int8(weight_NK: torch.Tensor) -> Pieces:
    scales = _row_scales(weight_NK, _INT8_MAX)
    codes = (weight_NK / scales).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return codes.to(torch.int8), scales, None


def _to_fp8(weight_NK: torch.Tensor) -> Pieces:
    scales = _row_scales(weight_NK, _FP8_MAX)
    return (weight_NK / scales).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scales, None


def _to_int4(weight_NK: torch.Tensor) -> Pieces:
    rows, columns = weight_NK.shape
    size = scheme_of("int4", columns).group_size
    padded = torch.nn.functional.pad(weight_NK, (0, -columns % size)).view(rows, -1, size)
    low, high = padded.amin(-1).clamp_(max=0), padded.amax(-1).clamp_(min=0)
    scales = ((high - low) / _INT4_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round_()
    codes = (padded / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, _INT4_MAX)
    return codes.view(rows, -1)[:, :columns].to(torch.int8), scales, zeros.to(torch.int8)


def _row_scales(weight_NK: torch.Tensor, largest_code: float) -> torch.Tensor:
    """[N, 1]; a row of zeros gets the smallest scale there is, since none may be 0."""
    largest = weight_NK.abs().amax(-1, keepdim=True)
    return largest.div_(largest_code).clamp_(min=torch.finfo(torch.float32).tiny)


KINDS: Mapping[str, Callable[[torch.Tensor], Pieces]] = {"int8": _to_int8, "int4": _to_int4, "fp8": _to_fp8}
"""What `--quantization` can make of a plain checkpoint. Never written to."""
