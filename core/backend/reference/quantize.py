"""Symmetric quantisation of activations: scale = max|x| / largest code, code = round-to-nearest-even(x / scale)."""

from __future__ import annotations

import torch

from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.backend.reference.numeric import accumulator, rounded
from octavo.core.base.errors import UnsupportedOp

LARGEST_CODE = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3FN: 448.0,
    QuantFormat.FP8_E4M3FNUZ: 240.0,
}
"""Of the formats that activations can have. Never written to."""


def quantize(x_TK: torch.Tensor, scheme: QuantScheme, *, out: torch.Tensor, scales: torch.Tensor) -> None:
    """Codes [T, K] to out; scales [T, ceil(K / group_size)], [T, 1] or [1, 1]. A group of zeros has scale 1.

    Raises UnsupportedOp for a scheme that is none of activations: with zero points, with blocks of several rows, or of
    a format outside ACTIVATION_FORMATS.
    """
    if not scheme.symmetric or scheme.block_rows > 1 or scheme.format not in LARGEST_CODE:
        raise UnsupportedOp(f"quantize: activations are quantised symmetrically, each row alone, not by {scheme}")
    x = x_TK.to(accumulator(x_TK))
    groups = _grouped(x, scheme.group_size)
    limit = LARGEST_CODE[scheme.format]
    scale = groups.abs().amax(dim=-1, keepdim=True) / limit
    scale = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32)
    codes = (groups / scale.to(x.dtype)).clamp(-limit, limit)
    if scheme.format in (QuantFormat.INT8, QuantFormat.INT4):
        codes = codes.round()
    codes = codes.reshape(x.shape) if scheme.group_size <= 0 else codes.flatten(1)[:, : x.shape[1]]
    out.copy_(rounded(codes, out.dtype))
    scales.copy_(scale.reshape(scales.shape))


def _grouped(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """x with one scale per row of its last axis; a last group that is cut short is filled with zeros."""
    if group_size == -1:
        return x.reshape(1, -1)
    if group_size == 0:
        return x
    whole = torch.nn.functional.pad(x, (0, -x.shape[-1] % group_size))
    return whole.reshape(whole.shape[0], -1, group_size)


def fake_quantized(x_TK: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """x quantised and back, in x's dtype: what a product over quantised activations sees."""
    rows, columns = x_TK.shape
    codes = torch.empty(rows, columns, dtype=scheme.format.code_dtype, device=x_TK.device)
    scales = torch.empty(scheme.scale_shape(rows, columns), dtype=torch.float32, device=x_TK.device)
    quantize(x_TK, scheme, out=codes, scales=scales)
    per_element = scales.to(x_TK.dtype)
    if scheme.group_size > 0:
        per_element = per_element.repeat_interleave(scheme.group_size, 1)[:, :columns]
    return codes.to(x_TK.dtype) * per_element
