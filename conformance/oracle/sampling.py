"""What sampling may give: the kept set and its probabilities, row by row in float64.

    x = (logit - max) / temperature → top-k floor → top-p floor over what is left → min-p floor → probabilities

Tokens that tie with the last one kept are kept. A token whose threshold decision hangs on less than MARGIN may be kept
or not: `certain` holds what every honest implementation keeps, `possible` what some may.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MARGIN = 1e-5
"""Relative to the mass at a threshold: √V·u32 for a vocabulary of 32k, and a few ulp of exp."""


@dataclass(frozen=True)
class Kept:
    """One row's outcome.

    Attributes:
        certain, possible: bool [V]; certain implies possible.
        probability: float64 [V] over the certain ones.
    """

    certain: torch.Tensor
    possible: torch.Tensor
    probability: torch.Tensor


def kept(logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Kept:
    """The tokens one row may give."""
    logits = logits_V.double()
    if temperature <= 0:
        only = torch.zeros(len(logits), dtype=torch.bool)
        only[int(logits.argmax())] = True
        return Kept(only, only, only.double())
    x = (logits - logits.max()) / temperature
    certain = _filtered(x, top_k, top_p - MARGIN, min_p * (1 + MARGIN))
    possible = _filtered(x, top_k, top_p + MARGIN, min_p * (1 - MARGIN))
    mass = torch.where(certain, x.exp(), 0.0)
    return Kept(certain, possible, mass / mass.sum())


def _filtered(x: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    keep = torch.ones_like(x, dtype=torch.bool)
    order = x.sort(descending=True).values
    if 0 < top_k < len(x):
        keep &= x >= order[top_k - 1]
    if top_p < 1 - MARGIN:
        left = torch.where(keep, x, -torch.inf).sort(descending=True).values
        mass = left.exp().cumsum(dim=0)
        reached = int((mass < top_p * mass[-1]).sum())
        keep &= x >= left[min(reached, len(x) - 1)]
    if min_p > 0:
        keep &= x.exp() >= min_p
    return keep
