"""Quantisers in float64, quantised weights, and 8- and 4-bit floats decoded from their bits.

    e4m3fn    s eeee mmm   bias 7   no infinities, NaN = s1111111, largest 448
    e4m3fnuz  s eeee mmm   bias 8   no infinities, no -0, NaN = 10000000, largest 240
    e2m1      s ee m       bias 1   no infinities, no NaN, largest 6                      the codes of mxfp4

value(code) and code(value) go through a table of all 256 codes, so that no dtype conversion of torch is trusted.
"""

from __future__ import annotations

import functools
import math

import torch

from octavo.conformance.oracle import gguf
from octavo.core.backend import QuantFormat, QuantizedTensor

LARGEST = {
    QuantFormat.INT8: 127.0,
    QuantFormat.INT4: 7.0,
    QuantFormat.FP8_E4M3FN: 448.0,
    QuantFormat.FP8_E4M3FNUZ: 240.0,
}
"""The largest code's value. Never written to."""

INTEGERS = frozenset({QuantFormat.INT8, QuantFormat.INT4})


@functools.cache
def fp8_values(*, is_fnuz: bool) -> torch.Tensor:
    """What each of the 256 bytes means, float64 [256]."""
    values = []
    bias = 8 if is_fnuz else 7
    for byte in range(256):
        sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
        is_nan = byte == 0x80 if is_fnuz else byte & 0x7F == 0x7F
        size = math.ldexp(mantissa, 1 - bias - 3) if exponent == 0 else math.ldexp(8 + mantissa, exponent - bias - 3)
        values.append(math.nan if is_nan else -size if sign else size)
    return torch.tensor(values, dtype=torch.float64)


def e2m1_values() -> torch.Tensor:
    """What each of the 16 codes of mxfp4 means, float64 [16]."""
    sizes = [math.ldexp(code % 2, -1) if code < 2 else math.ldexp(2 + code % 2, code // 2 - 2) for code in range(8)]
    return torch.tensor([*sizes, *(-size for size in sizes)], dtype=torch.float64)


def dequantise(weight: QuantizedTensor) -> torch.Tensor:
    """What a quantised weight means, float64 [N, K]: each element looks its own scale up."""
    scheme = weight.scheme
    if scheme.format.block is not None:
        return gguf.decode(scheme.format, weight.codes_NK)
    at, values = _scale_of_each(weight), _code_values(weight)
    if weight.zero_points is not None:
        values = values - weight.zero_points.double()[at]
    return values * weight.scales.double()[at]


def term_sizes(weight: QuantizedTensor) -> torch.Tensor:
    """|code · scale| + |zero point · scale| of each element, float64 [N, K]: what is added when both are apart."""
    if weight.scheme.format.block is not None:
        return gguf.sizes(weight.scheme.format, weight.codes_NK)
    at, values = _scale_of_each(weight), _code_values(weight).abs()
    if weight.zero_points is not None:
        values = values + weight.zero_points.double().abs()[at]
    return values * weight.scales.double().abs()[at]


def _code_values(weight: QuantizedTensor) -> torch.Tensor:
    if weight.scheme.format is QuantFormat.MXFP4:
        return e2m1_values()[weight.codes_NK.to(torch.int64)]
    return decode(weight.codes_NK)


def _scale_of_each(weight: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column in the scales of each element's."""
    scheme, (n, k) = weight.scheme, weight.codes_NK.shape
    rows = torch.zeros(n, dtype=torch.int64) if scheme.group_size == -1 else torch.arange(n) // scheme.block_rows
    columns = torch.arange(k) // scheme.group_size if scheme.group_size > 0 else torch.zeros(k, dtype=torch.int64)
    return rows[:, None], columns[None, :]


def decode(codes: torch.Tensor) -> torch.Tensor:
    """The value of each element of an fp8 or integer tensor, from its bits, float64."""
    if codes.dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz):
        table = fp8_values(is_fnuz=codes.dtype == torch.float8_e4m3fnuz)
        return table[codes.view(torch.uint8).to(torch.int64)]
    return codes.double()


def round_to_fp8(x: torch.Tensor, *, is_fnuz: bool) -> torch.Tensor:
    """x, float64, at the nearest code's value; ties to the even code; saturating. NaN stays NaN."""
    table = fp8_values(is_fnuz=is_fnuz)
    positive = table[:128]
    positive = positive[~positive.isnan()]
    size = x.double().abs().clamp(max=float(positive[-1]))
    above = torch.searchsorted(positive, size.contiguous()).clamp(max=len(positive) - 1)
    below = (above - 1).clamp(min=0)
    up, down = positive[above] - size, size - positive[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    rounded = torch.where(x.isnan(), torch.nan, positive[code])
    return torch.where(x < 0, -rounded, rounded)


def codes_apart(codes: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many codes lie between a tensor's elements and the codes of value `want`, int64; NaN is far away."""
    if codes.dtype == torch.int8:
        return (codes.to(torch.int64) - want.to(torch.int64)).abs()
    bits = codes.contiguous().view(torch.uint8).to(torch.int64)
    wanted = want.to(codes.dtype).view(torch.uint8).to(torch.int64)  # exact: want holds values of codes
    ordinals = [torch.where(b >= 128, 128 - b, b) for b in (bits, wanted)]
    return torch.where(decode(codes).isnan(), 256, (ordinals[0] - ordinals[1]).abs())


def quantise(x_TK: torch.Tensor, quant_format: QuantFormat, group_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of the codes [T, K] and fp32 scales [T, ceil(K / group_size)], [T, 1] or [1, 1], both widened to float64.

    scale = max|x| / largest code, rounded to fp32 (1 for a group of zeros); code = round-to-nearest-even(x / scale).
    """
    x = x_TK.double()
    if group_size > 0:  # a group that is cut short is a group with zeros
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % group_size))
    groups = (
        x.reshape(1, 1, -1) if group_size == -1 else x[:, None] if group_size == 0 else x.unflatten(1, (-1, group_size))
    )
    scale = groups.abs().amax(dim=-1) / LARGEST[quant_format]
    scale = torch.where(scale == 0, 1.0, scale).float().double()
    codes = (groups / scale[..., None]).clamp(-LARGEST[quant_format], LARGEST[quant_format])
    if quant_format in INTEGERS:
        codes = codes.round()
    else:
        codes = round_to_fp8(codes, is_fnuz=quant_format is QuantFormat.FP8_E4M3FNUZ)
    return codes.reshape(x.shape)[:, : x_TK.shape[1]], scale
