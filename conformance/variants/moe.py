"""Routing to experts and low-rank adapters, computed in other orders."""

from __future__ import annotations

from collections.abc import Callable

import torch

from octavo.conformance.variants.base import Op, Variant

SPLITS = 4
LOG2_E = 1.4426950408889634


def route_one_by_one(
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
    """Powers of 2, a sum in chunks, a reciprocal; the best is taken out top_k times instead of sorting."""
    x = logits_TE.float()
    scores = _softmax(x) if scoring == "softmax" else 1 / (1 + _exp2(-x * LOG2_E))
    choice = scores if bias_E is None else scores + bias_E.float()
    if num_groups > 1:
        choice = _in_groups(choice, num_groups, top_groups, best=1 if bias_E is None else 2)
    ids = _best(choice, top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights * (1 / weights.flip(-1).cumsum(dim=-1)[:, -1:])
    is_bad = x.isnan().any(dim=-1, keepdim=True)
    out_ids.copy_(torch.where(is_bad, torch.arange(top_k), ids))
    out_weights.copy_(torch.where(is_bad, torch.nan, weights * scale))


def route_by_logits(
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
    """Where scores only order and renormalise: the choice by the logits, and a softmax of the chosen alone."""
    if scoring != "softmax" or not renormalize or bias_E is not None or num_groups > 1:
        rest = {"num_groups": num_groups, "top_groups": top_groups, "scale": scale}
        route_one_by_one(logits_TE, top_k=top_k, out_weights=out_weights, out_ids=out_ids, scoring=scoring,
                         renormalize=renormalize, bias_E=bias_E, **rest)  # type: ignore[arg-type]  # fmt: skip
        return
    x = logits_TE.float()
    ids = _best(x, top_k)
    is_bad = x.isnan().any(dim=-1, keepdim=True)
    out_ids.copy_(torch.where(is_bad, torch.arange(top_k), ids))
    out_weights.copy_(torch.where(is_bad, torch.nan, x.gather(1, ids).softmax(dim=-1) * scale))


def _softmax(x_TE: torch.Tensor) -> torch.Tensor:
    powers = _exp2((x_TE - x_TE.amax(dim=-1, keepdim=True)) * LOG2_E)
    mass = sum((part.sum(dim=-1, keepdim=True) for part in powers.split(7, dim=-1)), torch.zeros(x_TE.shape[0], 1))
    return powers * (1 / mass)


def _exp2(x: torch.Tensor) -> torch.Tensor:
    """Rounded once from float64: torch's fp32 one differs between vectors and their tail, and equal logits must tie."""
    return torch.exp2(x.double()).float()


def _best(x_TE: torch.Tensor, k: int) -> torch.Tensor:
    """The lowest id of the largest, k times over."""
    left, ids = x_TE.clone(), []
    for _ in range(k):
        top = left.nan_to_num(nan=-torch.inf).amax(dim=-1, keepdim=True)
        at = torch.where(left == top, torch.arange(left.shape[1]), left.shape[1] - 1).amin(dim=-1, keepdim=True)
        ids.append(at)
        left.scatter_(1, at, -torch.inf)
    return torch.cat(ids, dim=1)


def _in_groups(choice_TE: torch.Tensor, num_groups: int, top_groups: int, best: int) -> torch.Tensor:
    grouped = choice_TE.unflatten(1, (num_groups, -1))
    ranked = grouped.sort(dim=-1, descending=True).values[..., :best]
    kept = _best(ranked.flip(-1).sum(dim=-1), top_groups)
    is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, kept, True)
    return torch.where(is_kept[..., None], grouped, -torch.inf).flatten(1)


Delta = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""x [n, K], a [R, K], b [N, R], scale [] in fp32 -> [n, N]."""


def lora_gemm_with(delta: Delta) -> Op:
    """The contract's lora_gemm around another pair of products."""

    def lora_gemm(
        x_TK: torch.Tensor,
        a_LRK: torch.Tensor,
        b_LNR: torch.Tensor,
        scales_L: torch.Tensor,
        adapter_T: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        for t, i in enumerate(adapter_T.tolist()):
            if i >= 0:
                added = delta(x_TK[t : t + 1].float(), a_LRK[i].float(), b_LNR[i].float(), scales_L[i].float())
                out[t] = (out[t].float() + added[0]).to(out.dtype)

    return lora_gemm


def split_k(x_TK: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """K in parts, the last one first; the scale goes to the narrow side, before the second product."""
    parts = [x_TK[:, part::SPLITS] @ a_RK[:, part::SPLITS].T for part in reversed(range(SPLITS))]
    return (sum(parts[1:], parts[0]) * scale) @ b_NR.T


def rank_by_rank(x_TK: torch.Tensor, a_RK: torch.Tensor, b_NR: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """An outer product per rank, added one after the other."""
    h_TR, total = x_TK @ a_RK.T, torch.zeros(x_TK.shape[0], b_NR.shape[0])
    for r in reversed(range(a_RK.shape[0])):
        total.addr_(h_TR[:, r], b_NR[:, r])
    return total * scale


def combine_fused(
    y_RM: torch.Tensor,
    places_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    out: torch.Tensor,
    residual: torch.Tensor | None = None,
) -> None:
    """A fused multiply-add for each choice: the product is not rounded."""
    total = torch.zeros(out.shape) if residual is None else residual.float()
    for place_T, weight_T in zip(places_TK.unbind(1), weights_TK.double().unbind(1), strict=True):
        term = y_RM[place_T.clamp(min=0)].double() * weight_T[:, None]
        total = torch.where(place_T[:, None] < 0, total, (total.double() + term).float())
    out.copy_(total)


VARIANTS = (
    Variant("combine-fused", "a fused multiply-add per choice", ("moe_combine",), {"moe_combine": combine_fused}),
    Variant("route-one-by-one", "the best expert taken out k times", ("moe_route",), {"moe_route": route_one_by_one}),
    Variant("route-by-logits", "a softmax of the chosen alone", ("moe_route",), {"moe_route": route_by_logits}),
    Variant("lora-split-k", "K in parts, h scaled", ("lora_gemm",), {"lora_gemm": lora_gemm_with(split_k)}),
    Variant("lora-ranks", "one rank after the other", ("lora_gemm",), {"lora_gemm": lora_gemm_with(rank_by_rank)}),
)
