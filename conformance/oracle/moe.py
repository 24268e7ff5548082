"""The choice of experts, the way to them and back, row by row in float64.

The order: highest choice value first, ties to the lowest id. With groups, only experts of the best groups are
eligible; a group counts as its best expert, or with a bias as the sum of its best two. Weights are unbiased scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights float64 and ids int64, [T, top_k]. A NaN row gets ids 0 .. top_k - 1 and NaN weights."""
    rows, experts = logits_TE.shape
    ids = torch.arange(top_k).repeat(rows, 1)
    weights = torch.full((rows, top_k), math.nan, dtype=torch.float64)
    bias = torch.zeros(experts, dtype=torch.float64) if bias_E is None else bias_E.double()
    for t in range(rows):
        logits = logits_TE[t].double()
        if bool(logits.isnan().any()):
            continue
        scores = torch.softmax(logits, dim=0) if scoring == "softmax" else 1 / (1 + (-logits).exp())
        choice = (scores + bias).tolist()
        eligible = _eligible(choice, num_groups, top_groups, best=1 if bias_E is None else 2)
        chosen = sorted(eligible, key=lambda e: (-choice[e], e))[:top_k]
        picked = scores[chosen]
        ids[t] = torch.tensor(chosen)
        weights[t] = (picked / picked.sum() if renormalize else picked) * scale
    return weights, ids


def _eligible(choice: list[float], num_groups: int, top_groups: int, best: int) -> list[int]:
    if num_groups == 1:
        return list(range(len(choice)))
    size = len(choice) // num_groups
    members = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    worth = [sum(sorted((choice[e] for e in group), reverse=True)[:best]) for group in members]
    kept = sorted(range(num_groups), key=lambda g: (-worth[g], g))[:top_groups]
    return [e for g in kept for e in members[g]]


@dataclass(frozen=True)
class Permutation:
    """rows [T · K] and places [T, K] int64, segment_start [E + 1] int32, as the op writes them."""

    rows: torch.Tensor
    places: torch.Tensor
    segment_start: torch.Tensor


def permute(ids_TK: torch.Tensor, *, first_expert: int, experts: int) -> Permutation:
    """Pairs taken expert by expert, and for each in the order t · K + k."""
    tokens, top_k = ids_TK.shape
    chosen = ids_TK.flatten().tolist()
    rows: list[int] = []
    bounds, places = [0], [-1] * len(chosen)
    for expert in range(first_expert, first_expert + experts):
        for pair, one in enumerate(chosen):
            if one == expert:
                places[pair] = len(rows)
                rows.append(pair // top_k)
        bounds.append(len(rows))
    rows += [0] * (len(chosen) - len(rows))
    return Permutation(
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(places, dtype=torch.int64).view(tokens, top_k),
        torch.tensor(bounds, dtype=torch.int32),
    )


@dataclass(frozen=True)
class Combination:
    """out, and |residual| + Σ|w·y|, which no partial sum passes; both [T, M]."""

    out: torch.Tensor
    added: torch.Tensor


def combine(
    y_RM: torch.Tensor, places_TK: torch.Tensor, weights_TK: torch.Tensor, residual_TM: torch.Tensor | None
) -> Combination:
    """residual + Σ_k w[t, k] · y[places[t, k]]; a place of -1 has no term."""
    shape = (places_TK.shape[0], y_RM.shape[1])
    out = torch.zeros(shape, dtype=torch.float64) if residual_TM is None else residual_TM.double()
    added = out.abs()
    for t, places in enumerate(places_TK.tolist()):
        for k, place in enumerate(places):
            if place >= 0:
                term = weights_TK[t, k].double() * y_RM[place].double()
                out[t] += term
                added[t] += term.abs()
    return Combination(out, added)
