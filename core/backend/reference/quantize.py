"""Symmetric quantisation of activations: scale = max|x| / largest code, code = round-to-nearest-even(x / scale)."""

from __future__ import annotations

import torch

from octavo.core.backend.meta import CODE_DTYPE
from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.backend.reference.numeric import accumulator, rounded
from octavo.core.base.errors import UnsupportedOp

LARGEST_CODE = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3FN: 448.0,
    QuantFormat.FP8_E4M3FNUZ: 240.0,
}


def quantize(x_TK: torch.Tensor, scheme: QuantScheme, *, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes [T, K] to out; scales [T, K / group_size], [T, 1] or [1, 1]. A group of zeros has scale 1.

    Raises UnsupportedOp for a scheme with zero points.
    """
    if not scheme.symmetric:
        raise UnsupportedOp("quantize: activations are quantised symmetrically; the scheme has zero points")
    x = x_TK.to(accumulator(x_TK))
    groups = _grouped(x, scheme.group_size)
    limit = LARGEST_CODE[scheme.format]
    scale = groups.abs().amax(dim=-1, keepdim=True) / limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32)
    codes = (groups / scale.to(x.dtype)).clamp(-limit, limit)
    if scheme.format in (QuantFormat.INT8, QuantFormat.INT4):
        codes = codes.round()
    out.copy_(rounded(codes, out.dtype).reshape(x.shape))
    scales.copy_(scale.reshape(scales.shape))


def _grouped(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """x with one scale per row of its last axis."""
    if group_size == -1:
        return x.reshape(1, -1)
    return x if group_size == 0 else x.unflatten(-1, (-1, group_size))


def fake_quantized(x_TK: torch.Tensor, activation: QuantFormat) -> torch.Tensor:
    """x after quantisation per row and back, in x's dtype: what a product over quantised activations sees."""
    codes = torch.empty(x_TK.shape, dtype=CODE_DTYPE[activation], device=x_TK.device)
    scales = torch.empty(x_TK.shape[0], 1, dtype=torch.float32, device=x_TK.device)
    quantize(x_TK, QuantScheme(activation), out=codes, scales=scales)
    return codes.to(x_TK.dtype) * scales.to(x_TK.dtype)
