"""Quantised codes: bit for bit where the scale is a power of two, else each within one code and nearly all the same.

    power of two   x / scale is exact, so that rounding to nearest even has one answer       lanes.exact
    else           x / scale is off by 2 ulp of fp32 (scale = max / largest, then a quotient): a code may fall to its
                   neighbour when x / scale lies that close to a tie. In units of a code's step that is 2 · 127 · 2^-24
                   for int8, less for the 8-bit floats: one element in 30,000. FLIPS allows for a kernel that multiplies
                   by a reciprocal rounded in fp32 as well; truncation changes half of all codes.

Scales themselves are max|x| / largest: one quotient, 2 ulp of fp32.
"""

from __future__ import annotations

import math

import torch

from octavo.conformance.finding import Finding
from octavo.conformance.lanes.tolerance import U32
from octavo.conformance.oracle.quantise import fp8_values
from octavo.core.backend import QuantFormat

FLIPS = 0.01
"""Share of the codes that may be off by one; at least one may."""


def near(output: str, got_values: torch.Tensor, want_values: torch.Tensor, quant_format: QuantFormat) -> Finding:
    """Codes by their values, float64: off by one code at most, and few of them."""
    if got_values.shape != want_values.shape or not got_values.numel():
        message = f"shape {list(got_values.shape)}, not {list(want_values.shape)}"
        return Finding(lane="statistical", output=output, compared=0, share=math.inf, message=message)
    steps = (_rank(got_values, quant_format) - _rank(want_values, quant_format)).abs()
    steps = torch.where(got_values.isfinite(), steps.double(), torch.inf)
    flips = float((steps > 0).double().mean())
    allowed = max(FLIPS, 1 / steps.numel())
    worst = int(steps.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), steps.shape))
    share = max(float(steps.flatten()[worst]), flips / allowed)
    message = f"{flips:.2%} of the codes differ, at {list(index)} by {float(steps.flatten()[worst]):g}"
    return Finding(
        lane="statistical",
        output=output,
        compared=steps.numel(),
        share=share,
        index=index,
        message=message if share > 1 else "",
    )


def scales(output: str, got: torch.Tensor, want: torch.Tensor) -> Finding:
    """Scales within 2 ulp; the smallest normal number's ulp below it."""
    wide = got.double()
    share = (wide - want).abs() / (4 * U32 * want.abs() + 2.0**-149)
    share = torch.where(wide.isfinite(), share, torch.inf)
    worst = int(share.argmax())
    return Finding(
        lane="statistical",
        output=output,
        compared=got.numel(),
        share=float(share.flatten()[worst]),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), share.shape)),
    )


def _rank(values: torch.Tensor, quant_format: QuantFormat) -> torch.Tensor:
    """The place of a code's value among all codes, so that neighbours differ by 1."""
    if quant_format in (QuantFormat.INT8, QuantFormat.INT4):
        return values.nan_to_num().to(torch.int64)
    table = fp8_values(is_fnuz=quant_format is QuantFormat.FP8_E4M3FNUZ)
    ladder = torch.unique(table[table.isfinite()])
    return torch.searchsorted(ladder, values.nan_to_num().contiguous())
