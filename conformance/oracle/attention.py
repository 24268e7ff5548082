"""Attention in float64, with the sizes that its bound needs. Contiguous per request; paging is the trial's affair.

    visible(row r, key j):  position p = L - Q + r      causal: j ≤ p      window w: j > p - w
    score = scale·q·k → softcap c·tanh(s/c) → ALiBi slope·(j - p) → mask by select → softmax, sinks in the denominator

A row that sees no key gives 0 and log-sum-exp -inf, sinks or not. Shape letters: Q rows and L keys of one request, H
query heads, K KV heads, D head dim, T tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octavo.conformance.lanes.tolerance import Bound, attention_bound, lse_bound

ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Rule:
    """How scores are formed and masked."""

    softmax_scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """What the oracle found, all float64.

    Attributes:
        out: [T, H, Dv]; lse: [T, H].
        weighted_rms, weighted_sum: Q = √Σp²v² and A = Σp|v|, [T, H, Dv].
        score_size: σ = max_j scale·Σ|q·k| over the keys seen, [T, H, 1].
        value_per_mass: Σ|v| over the keys seen / Σexp(s - max), max over scores and sink, [T, H, Dv].
        num_keys: keys seen, [T, 1, 1].
    """

    out: torch.Tensor
    lse: torch.Tensor
    weighted_rms: torch.Tensor
    weighted_sum: torch.Tensor
    score_size: torch.Tensor
    value_per_mass: torch.Tensor
    num_keys: torch.Tensor

    def out_bound(self, head_dim: int, dtype: torch.dtype, p_dtype: torch.dtype | None = None) -> Bound:
        return attention_bound(
            self.out,
            weighted_rms=self.weighted_rms,
            weighted_sum=self.weighted_sum,
            score_size=self.score_size,
            value_per_mass=self.value_per_mass,
            head_dim=head_dim,
            num_keys=self.num_keys,
            dtype=dtype,
            p_dtype=p_dtype,
        )

    def lse_bound(self, head_dim: int) -> Bound:
        return lse_bound(
            self.lse, score_size=self.score_size[..., 0], head_dim=head_dim, num_keys=self.num_keys[..., 0]
        )


def visible(num_rows: int, num_keys: int, rule: Rule, first_row: int = 0, end_row: int | None = None) -> torch.Tensor:
    """[Q, L] bool: what rows first_row .. end_row of num_rows see."""
    position = torch.arange(num_rows)[first_row:end_row, None] + (num_keys - num_rows)
    distance = position - torch.arange(num_keys)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if rule.causal:
        seen &= distance >= 0
    if rule.window is not None:
        seen &= distance < rule.window
    return seen


def attend(
    q_THD: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    query_lens: Sequence[int],
    rule: Rule,
) -> Attended:
    """A ragged batch: request b has query_lens[b] rows of q, keys[b] [L, K, D] and values[b] [L, K, Dv].

    Scales of a quantised cache are applied beforehand.
    """
    parts, start = [], 0
    for key, value, length in zip(keys, values, query_lens, strict=True):
        for row in range(0, length, ROWS_AT_ONCE):
            end = min(row + ROWS_AT_ONCE, length)
            parts.append(_rows(q_THD[start + row : start + end], key, value, rule, (length, row, end)))
        start += length
    if not parts:
        return _nothing(q_THD, values)
    fields = {name: torch.cat([getattr(p, name) for p in parts]) for name in Attended.__dataclass_fields__}
    return Attended(**fields)


def merged(a: Attended, b: Attended) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over both parts' keys; a part of lse -inf adds nothing, whatever its values."""
    return merge(a.out, a.lse, b.out, b.lse)


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ exp(lse_i - top)·out_i / Σ exp(lse_i - top), and top + log of that sum."""
    lses = torch.stack((lse_a.double(), lse_b.double()))
    top = lses.amax(dim=0)
    mass = torch.where(lses == -torch.inf, 0.0, (lses - torch.where(top == -torch.inf, 0.0, top)).exp())
    outs = torch.stack((out_a.double(), out_b.double()))
    outs = torch.where(mass[..., None] == 0, 0.0, outs * mass[..., None]).sum(dim=0)
    total = mass.sum(dim=0)
    out = torch.where(total[..., None] == 0, 0.0, outs / total[..., None])
    return out, torch.where(total == 0, -torch.inf, top + total.log())


def _rows(q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule, span: tuple[int, int, int]) -> Attended:
    """Rows first .. end of a request of `num_rows` rows."""
    num_rows, first, end = span
    num_keys = key.shape[0]
    group = q.shape[1] // key.shape[1]
    seen_QL = visible(num_rows, num_keys, rule, first, end)
    q_HQD = q.double().transpose(0, 1)
    # A hidden key's value must not matter, NaN included: select before any arithmetic mixes it in.
    used_L11 = seen_QL.any(dim=0)[:, None, None]
    k_KDL = torch.where(used_L11, key.double(), 0.0).permute(1, 2, 0)
    v_KLD = torch.where(used_L11, value.double(), 0.0).transpose(0, 1)
    scores = _scores(q_HQD, k_KDL, rule, num_keys - num_rows + first)
    scores = torch.where(seen_QL, scores, -torch.inf)
    sizes = torch.where(seen_QL, _per_kv_head(q_HQD.abs(), k_KDL.abs()) * abs(rule.softmax_scale), 0.0)
    top = scores.amax(dim=-1, keepdim=True) if num_keys else torch.full((*scores.shape[:2], 1), -torch.inf).double()
    is_empty = top == -torch.inf
    top = torch.where(is_empty, 0.0, top)
    mass = (scores - top).exp()
    total = mass.sum(dim=-1, keepdim=True)
    lead = torch.zeros_like(top)  # of the sink before the best score, where it leads
    if rule.sinks_H is not None:
        lead = rule.sinks_H.double()[:, None, None] - top
        total = total + lead.exp()
    p = torch.where(is_empty, 0.0, mass / total)
    lse = torch.where(is_empty, -torch.inf, top + total.log())
    sum_v = (seen_QL.double() @ v_KLD.abs()).repeat_interleave(group, dim=0)
    found = Attended(
        out=_per_kv_head(p, v_KLD),
        lse=lse[..., 0],
        weighted_rms=_per_kv_head(p.square(), v_KLD.square()).sqrt(),
        weighted_sum=_per_kv_head(p, v_KLD.abs()),
        score_size=sizes.amax(dim=-1, keepdim=True) if num_keys else torch.zeros_like(top),
        value_per_mass=torch.where(is_empty, 0.0, sum_v / total * lead.clamp(min=0).exp()),
        num_keys=seen_QL.sum(dim=-1).double()[None, :, None],
    )
    return replace(found, **{name: getattr(found, name).transpose(0, 1) for name in Attended.__dataclass_fields__})


def _per_kv_head(x_HQA: torch.Tensor, y_KAB: torch.Tensor) -> torch.Tensor:
    """x @ y [H, Q, B], where consecutive query heads share a KV head's y, which is never copied."""
    num_kv_heads, rows = y_KAB.shape[0], x_HQA.shape[0] // y_KAB.shape[0] * x_HQA.shape[1]
    product = x_HQA.reshape(num_kv_heads, rows, x_HQA.shape[2]) @ y_KAB
    return product.reshape(*x_HQA.shape[:2], y_KAB.shape[2])


def _scores(q_HQD: torch.Tensor, k_KDL: torch.Tensor, rule: Rule, first_position: int) -> torch.Tensor:
    scores = _per_kv_head(q_HQD, k_KDL) * rule.softmax_scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.alibi_slopes_H is not None:
        rows = torch.arange(first_position, first_position + q_HQD.shape[1])
        distance = torch.arange(k_KDL.shape[2])[None, :] - rows[:, None]
        scores = scores + rule.alibi_slopes_H.double()[:, None, None] * distance
    return scores


def _nothing(q_THD: torch.Tensor, values: Sequence[torch.Tensor]) -> Attended:
    heads = q_THD.shape[1]
    width = values[0].shape[-1] if values else 0
    empty = torch.empty(0, heads, width, dtype=torch.float64)
    thin = torch.empty(0, heads, 1, dtype=torch.float64)
    return Attended(empty, thin[..., 0], empty, empty, thin, empty, thin[:, :1])
