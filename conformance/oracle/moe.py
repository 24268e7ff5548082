"""The choice of experts, row by row in float64.

The order: highest choice value first, ties to the lowest id. With groups, only experts of the best groups are
eligible; a group counts as its best expert, or with a bias as the sum of its best two. Weights are unbiased scores.
"""

from __future__ import annotations

import math

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
