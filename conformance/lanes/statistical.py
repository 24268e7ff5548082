"""The statistical lane: every element within its bound, the rms within its prediction, and no systematic gain.

    element   max |e| / bound ≤ 1                       a wrong element, wherever it is
    rms       √mean(e²) ≤ 2 · √mean(sigma²)             many elements a little wrong: a dropped token, a stale slot
    gain      |⟨o, ref⟩/⟨ref, ref⟩ - 1| ≤ u + 6·SE      all elements off by one factor: scale × 1.01
              SE = √Σ(sigma²·ref²) / ⟨ref, ref⟩         the standard error of that ratio if sigma is right

The oracle is float64 and fed the inputs as rounded; the bounds are derived in tolerance.py.
"""

from __future__ import annotations

import math

import torch

from octavo.conformance.finding import Finding
from octavo.conformance.lanes.tolerance import Bound

RMS_FACTOR = 2.0
GAIN_ERRORS = 6.0
FEWEST_FOR_RMS = 64
"""With fewer elements the sample's rms says nothing that the element bound doesn't: its own spread is 1/√(2n)."""


def statistical(output: str, got: torch.Tensor, want: torch.Tensor, bound: Bound) -> Finding:
    """Compare an output with the oracle's float64 values."""
    if got.shape != want.shape:
        message = f"shape {list(got.shape)}, not {list(want.shape)}"
        return Finding(lane="statistical", output=output, compared=0, share=math.inf, message=message)
    if not got.numel():
        return Finding(lane="statistical", output=output, compared=0)
    value, reference = got.double(), want.double()
    # Where the oracle itself is infinite (log-sum-exp of a row that sees nothing) only the same will do.
    settled = ~reference.isfinite() & (value == reference)
    error = torch.where(settled, 0.0, value - reference)
    error = torch.where(error.isfinite(), error, torch.inf)
    finite = torch.where(reference.isfinite(), reference, 0.0)
    share = _shares(error.abs(), bound.element)
    worst = int(share.argmax())
    rms, gain = _rms(error, bound), _gain(error, finite, bound)
    return Finding(
        lane="statistical",
        output=output,
        compared=got.numel(),
        share=float(share.flatten()[worst]),
        index=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)),
        rms=rms if got.numel() >= FEWEST_FOR_RMS else None,
        gain=gain,
    )


def _shares(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """error / bound, where 0 / 0 is fine and x / 0 is not."""
    return torch.where(error == 0, 0.0, error / bound)


def _rms(error: torch.Tensor, bound: Bound) -> float:
    predicted = float(bound.sigma.square().mean().sqrt())
    measured = float(error.square().mean().sqrt())
    return 0.0 if measured == 0 else math.inf if predicted == 0 else measured / (RMS_FACTOR * predicted)


def _gain(error: torch.Tensor, reference: torch.Tensor, bound: Bound) -> float:
    """⟨o, ref⟩/⟨ref, ref⟩ - 1 = ⟨e, ref⟩/⟨ref, ref⟩."""
    power = float(reference.square().sum())
    if power == 0:
        return 0.0
    off = abs(float((error * reference).sum())) / power
    standard_error = math.sqrt(float((bound.sigma.square() * reference.square()).sum())) / power
    return off / (bound.unit + GAIN_ERRORS * standard_error)
