"""The `sample` op in plain torch: what the next token of each row is, given one uniform number per row.

    logits [V] --minus max, / temperature--> x --top-k, top-p, min-p--> kept ids --exp, running sum in id order--> draw

Every filter is a threshold on x, so tokens that tie with the last one kept are kept as well: the outcome depends on
no sort's order, and any backend can reproduce it. Nothing here mixes rows, and no sum's order of additions depends on
how many rows there are (running sums only: a plain sum may be split among threads), so a row's token is the same alone
and in any batch.

Legend: R rows, V vocabulary, K longest top-k of the batch.
"""

from __future__ import annotations

import torch

_TOP_P_PREFIX = 256
"""Tokens sorted at first for top-p; a row whose mass lies deeper is sorted whole."""


def sample_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row by the inverse of the cumulative distribution.

    Shapes: logits [R, V] float32; temperature, top_p, min_p, uniform [R] float32; top_k [R] int64.
        Returns [R] int64; -1 for a row without a finite maximum (all -inf, some +inf or NaN).
    Units: temperature 0 takes the lowest id of the maximum; top_k <= 0 or >= V, top_p >= 1, min_p <= 0 keep all;
        uniform in [0, 1).
    Mutates: nothing.
    Numerics: differences to the maximum are divided, so no temperature overflows. Top-p counts the mass left by
        top-k, min-p is relative to the most likely token.
    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p).
    """
    top_R, greedy_R = logits_RV.max(dim=-1)
    greedy_R = torch.where(top_R.isfinite(), greedy_R, -1)
    is_greedy_R = (temperature_R <= 0) | (greedy_R < 0)
    if bool(is_greedy_R.all()):
        return greedy_R
    divisor_R = torch.where(is_greedy_R, torch.ones_like(temperature_R), temperature_R)
    scaled_RV = (logits_RV - top_R.unsqueeze(-1)).div_(divisor_R.unsqueeze(-1))
    scaled_RV[is_greedy_R] = 0.0  # not drawn from, so that whatever they hold is in nobody's way
    top_k_floor_R = _top_k_floor(scaled_RV, top_k_R)
    floor_R = torch.maximum(top_k_floor_R, _top_p_floor(scaled_RV, top_k_floor_R, top_p_R))
    floor_R = torch.maximum(floor_R, min_p_R.clamp(0, 1).log())
    if bool((floor_R > -torch.inf).any()):
        scaled_RV.masked_fill_(scaled_RV < floor_R.unsqueeze(-1), -torch.inf)
    return torch.where(is_greedy_R, greedy_R, _draw(scaled_RV.exp_(), uniform_R))


def _top_k_floor(scaled_RV: torch.Tensor, top_k_R: torch.Tensor) -> torch.Tensor:
    """Per row the k-th largest value; -inf where top-k keeps all."""
    floor_R = torch.full_like(scaled_RV[:, 0], -torch.inf)
    rows = torch.nonzero((top_k_R > 0) & (top_k_R < scaled_RV.shape[1])).squeeze(-1)
    if rows.numel():
        k_R = top_k_R[rows]
        largest_RK = _rows(scaled_RV, rows).topk(int(k_R.max()), dim=-1).values
        floor_R[rows] = largest_RK.gather(1, k_R.unsqueeze(-1) - 1).squeeze(-1)
    return floor_R


def _top_p_floor(scaled_RV: torch.Tensor, top_k_floor_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
    """Per row the smallest value among the most likely tokens whose mass reaches top_p; -inf where all are kept."""
    floor_R = torch.full_like(top_k_floor_R, -torch.inf)
    rows = torch.nonzero(top_p_R < 1).squeeze(-1)
    if not rows.numel():
        return floor_R
    x_RV = _rows(scaled_RV, rows)
    x_RV = x_RV.masked_fill(x_RV < top_k_floor_R[rows].unsqueeze(-1), -torch.inf)
    target_R = top_p_R[rows] * x_RV.exp().cumsum(dim=-1)[:, -1]
    prefix = min(_TOP_P_PREFIX, x_RV.shape[1])
    floor_R[rows], reached_R = _mass_floor(x_RV.topk(prefix, dim=-1).values, target_R)
    deep = torch.nonzero(~reached_R).squeeze(-1)
    if deep.numel() and prefix < x_RV.shape[1]:
        x_RV = _rows(x_RV, deep).sort(dim=-1, descending=True).values
        floor_R[rows[deep]] = _mass_floor(x_RV, target_R[deep])[0]
    return floor_R


def _mass_floor(x_RK: torch.Tensor, target_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of values in falling order, the one at which the sum of weights reaches the target, and whether it does."""
    weight_RK = x_RK.exp()
    mass_RK = weight_RK.cumsum(dim=-1)
    index_R = torch.searchsorted(mass_RK, target_R.unsqueeze(-1)).squeeze(-1)
    reached_R = index_R < mass_RK.shape[1]
    # Rounding may leave the whole sum just under the target: then every token that has weight is kept.
    index_R = torch.minimum(index_R, (weight_RK > 0).sum(dim=-1) - 1)
    return x_RK.gather(1, index_R.unsqueeze(-1)).squeeze(-1), reached_R


def _draw(weight_RV: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
    """First id whose running sum of weights exceeds uniform times the total."""
    mass_RV = weight_RV.cumsum(dim=-1)
    total_R1 = mass_RV[:, -1:].contiguous()
    ids_R1 = torch.searchsorted(mass_RV, uniform_R.unsqueeze(-1) * total_R1, right=True)
    # uniform * total may round up to the total: then the last id that adds to the sum is meant.
    return torch.minimum(ids_R1, torch.searchsorted(mass_RV, total_R1)).squeeze(-1)


def _rows(matrix_RV: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows named; the matrix itself when that is all of them."""
    return matrix_RV if rows.numel() == matrix_RV.shape[0] else matrix_RV.index_select(0, rows)
