"""What all reference ops share: in what they accumulate, how a result is stored, and how codes are read again."""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def accumulator(*tensors: torch.Tensor) -> torch.dtype:
    """fp64 when any tensor is fp64, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


INT8_LIMIT = 127
"""The largest integer of one byte that a rounded number becomes: the codes are symmetric, -128 is none of them."""


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype, to nearest even; types of one byte saturate instead of overflowing. int8 has 0 for NaN."""
    if dtype == torch.int8:
        return x.nan_to_num(nan=0.0).round().clamp(-INT8_LIMIT, INT8_LIMIT).to(dtype)
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)  # NaN stays NaN
    return x.to(dtype)


def widened(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in a wider dtype, exactly.

    8-bit floats are looked up among their 256 values: torch converts them one by one, more than ten times as slowly.
    """
    if x.dtype not in FP8_DTYPES:
        return x.to(dtype)
    values = torch.arange(256, dtype=torch.uint8, device=x.device).view(x.dtype).to(dtype)
    return values.index_select(0, x.view(torch.uint8).to(torch.int32).flatten()).view(x.shape)
