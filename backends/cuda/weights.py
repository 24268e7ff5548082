"""Weights on Hopper: which 8-bit floats its tensor cores read, and how others become them."""

from __future__ import annotations

import torch

from octavo.backends.common.forms import Form, form_of
from octavo.core.backend import QuantFormat, Unsupported, WeightSpec

FP8_DTYPE = torch.float8_e4m3fn
FP8_FORMATS = (QuantFormat.FP8_E4M3FN,)
"""e4m3fnuz is not among them: it has numbers half as large as the smallest of e4m3fn."""


def weight_form(spec: WeightSpec) -> Form | Unsupported:
    """How a weight lies on the device."""
    return form_of(spec, FP8_DTYPE, FP8_FORMATS)


def repack_fp8(_: QuantFormat, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Codes in the chip's 8-bit float, and the factor that their scales take."""
    return codes, 1.0
