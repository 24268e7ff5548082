"""Weights on CDNA3: which 8-bit floats its matrix cores read, and how others become them."""

from __future__ import annotations

import torch

from octavo.backends.common.forms import Form, form_of
from octavo.core.backend import QuantFormat, Unsupported, WeightSpec

FP8_DTYPE = torch.float8_e4m3fnuz
FP8_FORMATS = (QuantFormat.FP8_E4M3FNUZ, QuantFormat.FP8_E4M3FN)
"""e4m3fn as well: with a bias of 8 instead of 7 the same bits mean half."""

_NAN_FN, _NAN_FNUZ = 0x7F, 0x80


def weight_form(spec: WeightSpec) -> Form | Unsupported:
    """How a weight lies on the device."""
    return form_of(spec, FP8_DTYPE, FP8_FORMATS)


def repack_fp8(quant_format: QuantFormat, codes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Codes in the chip's 8-bit float, and the factor that their scales take.

    Two bit patterns differ besides the bias: 0x80 is -0 in e4m3fn and NaN here, 0x7F and 0xFF are NaN there and ±240.
    """
    if quant_format is QuantFormat.FP8_E4M3FNUZ:
        return codes, 1.0
    bits = codes.contiguous().view(torch.uint8)
    is_nan = (bits & 0x7F) == _NAN_FN
    bits = torch.where(bits == _NAN_FNUZ, 0, bits)
    return torch.where(is_nan, _NAN_FNUZ, bits).to(torch.uint8).view(FP8_DTYPE), 2.0
