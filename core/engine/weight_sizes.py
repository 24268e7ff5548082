"""How many bytes a model's weights take on a device, quantised ones included; the engine's start and `octavo plan` ask.

    plain                                         elements in the storage dtype
    quantised, where the backend multiplies it    codes in their bits, fp32 scales (and offsets) per row and group
    quantised, where it does not                  dequantised, as plain
    what latent attention multiplies its queries  plain, and twice where steps may have any shape: once for each of its
    and results, or its latents, by               forms (models/decoder/mla.py)

Scales are counted as GPUs lay them, whatever shares them in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from octavo.core.backend.device import Capabilities
from octavo.core.backend.opset import OpSet
from octavo.core.backend.quant import MXFP4_GROUP, QuantFormat, QuantScheme
from octavo.core.backend.specs import GemmSpec, WeightSpec
from octavo.core.layers.stored import multiplied_scheme
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.weight_bytes import weight_bytes
from octavo.core.quant.formats import WeightFormats

_SCALE_BYTES = 4
_LATENT_SUFFIX = ".kv_b_proj.weight"
_USUAL_SIZE = 4096
"""Rows and columns of the weight by which a device is asked for a scheme as such."""


def model_bytes(
    checkpoint: Checkpoint,
    formats: WeightFormats,
    opset: OpSet,
    *,
    dtype: torch.dtype,
    device: Capabilities,
    num_ranks: int = 1,
) -> int:
    """Bytes of the weights that each of `num_ranks` devices holds.

    Args:
        checkpoint, formats: from `open_quantized`.
        opset: of the device; told nothing, only asked.
        dtype: how plain weights are stored.
        device: the opset's.
    """
    return weight_bytes(checkpoint, dtype, num_ranks, of_matrix=_size_of(formats, opset, dtype, device))


def has_product_for(opset: OpSet, capabilities: Capabilities) -> Callable[[QuantScheme], bool]:
    """What tells whether a device multiplies weights of a scheme, for `open_quantized`."""
    dtype = capabilities.default_dtype
    activation_dtype = capabilities.activation_dtype[dtype]
    plain = GemmSpec(WeightSpec(_USUAL_SIZE, _USUAL_SIZE, dtype), activation_dtype, activation_dtype)
    return lambda scheme: multiplied_scheme(opset, plain, scheme) is not None


def quantised_formats(checkpoint: Checkpoint, formats: WeightFormats) -> tuple[str, ...]:
    """The formats that layers are kept in, each once, in the order of the files."""
    found: dict[str, None] = {}
    for name in checkpoint.names():
        if name.endswith(".weight") and (scheme := formats.linear([name.removesuffix(".weight")]).scheme) is not None:
            found[str(scheme.format)] = None
    return tuple(found)


def packed_bytes(scheme: QuantScheme, rows: int, columns: int) -> int:
    """Bytes of a weight [rows, columns] of this scheme, as devices pack it."""
    block = scheme.format.block
    if block is not None:
        return rows * columns // block.elements * block.num_bytes
    bits = 4 if scheme.format in (QuantFormat.INT4, QuantFormat.MXFP4) else 8
    group = MXFP4_GROUP if scheme.format is QuantFormat.MXFP4 else max(scheme.group_size, 0)
    scales = rows * (math.ceil(columns / group) if group else 1)
    return math.ceil(rows * columns * bits / 8) + scales * _SCALE_BYTES * (1 if scheme.symmetric else 2)


def _size_of(
    formats: WeightFormats, opset: OpSet, dtype: torch.dtype, device: Capabilities
) -> Callable[[str, tuple[int, ...]], float]:
    """What tells the bytes of a tensor of two axes or more."""
    activation_dtype = device.activation_dtype[dtype]

    def size_of(name: str, shape: tuple[int, ...]) -> float:
        if name.endswith(_LATENT_SUFFIX):
            return math.prod(shape) * dtype.itemsize * (2 if device.dynamic_shapes else 1)
        scheme = formats.linear([name.removesuffix(".weight")]).scheme if name.endswith(".weight") else None
        if scheme is not None and len(shape) == 2:
            product = GemmSpec(WeightSpec(shape[0], shape[1], dtype), activation_dtype, activation_dtype)
            if multiplied_scheme(opset, product, scheme) is not None:
                return packed_bytes(scheme, shape[0], shape[1])
        return math.prod(shape) * dtype.itemsize

    return size_of
