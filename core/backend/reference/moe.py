"""Mixtures of experts: the choice of experts, the way to them and the way back.

Shape letters: T tokens, K chosen experts of a token, E experts, g groups, R sorted rows, M hidden.
Source: Shazeer et al. 2017; Lepikhin et al. 2020; DeepSeek-AI 2024 (groups, and the correction bias of V3).
"""

from __future__ import annotations

import torch

from octavo.core.backend.reference.numeric import accumulator, rounded


def moe_route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    out_weights: torch.Tensor,
    out_ids: torch.Tensor,
    scoring: str = "softmax",
    renormalize: bool = True,
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> None:
    """Weights are the unbiased scores of the chosen experts, times `scale`, after renormalisation if asked for.

    With groups, only experts of the top_groups best groups are eligible; a group counts as much as its best
    expert, or with a bias as the sum of its best two.
    """
    logits_TE = logits_TE.to(accumulator(logits_TE))
    scores_TE = torch.softmax(logits_TE, dim=-1) if scoring == "softmax" else torch.sigmoid(logits_TE)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_groups > 1:
        choice_TE = _limit_groups(choice_TE, num_groups, top_groups, best=1 if bias_E is None else 2)
    ids = _top(choice_TE, top_k)
    weights = scores_TE.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    is_bad_T1 = logits_TE.isnan().any(dim=-1, keepdim=True)
    out_ids.copy_(torch.where(is_bad_T1, torch.arange(top_k, device=ids.device), ids))
    out_weights.copy_((weights * scale).masked_fill(is_bad_T1, torch.nan))


def _limit_groups(choice_TE: torch.Tensor, num_groups: int, top_groups: int, best: int) -> torch.Tensor:
    """-inf for the experts outside each row's best groups."""
    choice_Tge = choice_TE.reshape(choice_TE.shape[0], num_groups, choice_TE.shape[1] // num_groups)
    value_Tg = choice_Tge.topk(min(best, choice_Tge.shape[-1]), dim=-1).values.sum(dim=-1)
    eligible_Tg = torch.zeros_like(value_Tg, dtype=torch.bool).scatter_(1, _top(value_Tg, top_groups), True)
    return choice_Tge.masked_fill(~eligible_Tg[..., None], -torch.inf).flatten(1)


def _top(x: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of each row's k largest, largest first, ties to the lowest id (which topk does not promise)."""
    return x.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def moe_permute(
    ids_TK: torch.Tensor,
    *,
    first_expert: int,
    out_rows: torch.Tensor,
    out_places: torch.Tensor,
    segment_start: torch.Tensor,
) -> None:
    """Pairs whose expert is not here are sorted behind all others, which makes them the tail."""
    experts, pairs = segment_start.shape[0] - 1, ids_TK.numel()
    local = ids_TK.flatten().to(torch.int64) - first_expert
    local = torch.where((local >= 0) & (local < experts), local, experts)
    expert_of_row, order = local.sort(stable=True)
    bounds = torch.searchsorted(expert_of_row, torch.arange(experts + 1, device=local.device))
    segment_start.copy_(bounds)
    rows = torch.arange(pairs, device=local.device)
    is_used = rows < bounds[-1]
    out_rows.copy_(torch.where(is_used, order // max(ids_TK.shape[1], 1), 0))
    places = torch.empty_like(rows).scatter_(0, order, torch.where(is_used, rows, -1))
    out_places.copy_(places.view(ids_TK.shape))


def moe_combine(
    y_RM: torch.Tensor,
    places_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """One choice of all tokens at a time. A missing row is masked, not multiplied by 0: what lies there may be NaN."""
    acc = accumulator(y_RM)
    total = torch.zeros(out.shape, dtype=acc, device=out.device) if residual is None else residual.to(acc, copy=True)
    for place_T, weight_T in zip(places_TK.unbind(1), weights_TK.to(acc).unbind(1), strict=True):
        part = y_RM[place_T.clamp(min=0)].to(acc) * weight_T[:, None]
        total += part.masked_fill(place_T[:, None] < 0, 0)
    out.copy_(rounded(total, out.dtype))
