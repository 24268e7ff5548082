"""The two rules of arithmetic that all reference ops share: in what they accumulate, and how a result is stored."""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def accumulator(*tensors: torch.Tensor) -> torch.dtype:
    """fp64 when any tensor is fp64, else fp32."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in another dtype, to nearest even; 8-bit floats saturate instead of overflowing."""
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)  # NaN stays NaN
    return x.to(dtype)
