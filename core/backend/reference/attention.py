"""Attention of ragged queries over paged or contiguous keys, and the merge of two parts.

Shape letters: B requests, T tokens, Q rows of one tile, L keys, H query heads, K KV heads, G = H / K, D head dim.

    request b, KV length 7, 3 queries, window 4          key  0 1 2 3 4 5 6
    (causal masks are aligned bottom-right:       row 0 = 4   . x x x x
    row r stands at position 7 - 3 + r)           row 1 = 5   . . x x x x
                                                  row 2 = 6   . . . x x x x

Key 0 is never read: its block may have left the window and belong to somebody else. Nor is anything at or beyond
the KV length. What is read but hidden from a row is masked by select, so that no value of K can leak through.
Order of a score: scale, softcap c·tanh(s / c), ALiBi slope·(key - row), mask. Sinks join the denominator and the
log-sum-exp and carry no value; a row that sees no key gives 0 and log-sum-exp -inf, sinks or not.
Source: Kwon et al. 2023 (PagedAttention); Press et al. 2022 (ALiBi); Milakov & Gimelshein 2018 (merge).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.backend.kv import AttentionMetadata, KVCache
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference.cache import indexable, per_head, views
from octavo.core.backend.reference.numeric import accumulator, widened

TILE_ROWS = 256  # query rows at a time: bounds the scores at H * 256 * L elements


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are formed and which keys a row sees; the same for all requests of a call."""

    softmax_scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    alibi_slopes_H: torch.Tensor | None = None

    def keys(self, position: int, tile: slice, length: int) -> tuple[int, int]:
        """First and one past the last key to be read for a tile whose first row stands at `position`."""
        first = 0 if self.window is None else max(0, position - self.window + 1)
        stop = max(0, position + tile.stop - tile.start) if self.causal else length
        return min(first, stop), stop

    def visible(self, rows_Q: torch.Tensor, keys_L: torch.Tensor) -> torch.Tensor:
        """[Q, L] bool from absolute positions. A window bounds the past, causality the future."""
        distance_QL = rows_Q[:, None] - keys_L[None, :]
        seen_QL = torch.ones_like(distance_QL, dtype=torch.bool)
        if self.causal:
            seen_QL &= distance_QL >= 0
        if self.window is not None:
            seen_QL &= distance_QL < self.window
        return seen_QL


def attend(
    q_QHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    rule: Rule,
    *,
    first_row: int,
    first_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request's attention: out [Q, H, Dv] and log-sum-exp [Q, H], both in the accumulator's dtype.

    Args:
        k_LKD, v_LKD: in the accumulator's dtype, scales applied.
        first_row, first_key: absolute positions of row 0 and key 0.
    """
    num_rows, num_heads, _ = q_QHD.shape
    num_keys, num_kv_heads, v_head_dim = v_LKD.shape
    group = num_heads // num_kv_heads
    q_KGQD = q_QHD.to(k_LKD.dtype).unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
    scores_HQL = torch.einsum("kgqd,lkd->kgql", q_KGQD, k_LKD).flatten(0, 1) * rule.softmax_scale
    if rule.softcap is not None:
        scores_HQL = rule.softcap * torch.tanh(scores_HQL / rule.softcap)
    rows_Q = torch.arange(first_row, first_row + num_rows, device=q_QHD.device)
    keys_L = torch.arange(first_key, first_key + num_keys, device=q_QHD.device)
    if rule.alibi_slopes_H is not None:
        scores_HQL = scores_HQL + rule.alibi_slopes_H.to(scores_HQL.dtype)[:, None, None] * (keys_L - rows_Q[:, None])
    seen_QL = rule.visible(rows_Q, keys_L)
    scores_HQL = scores_HQL.masked_fill(~seen_QL, -torch.inf)
    lse_HQ = torch.logsumexp(scores_HQL, dim=-1)
    empty_Q = ~seen_QL.any(dim=-1)
    if rule.sinks_H is not None:
        lse_HQ = torch.logaddexp(lse_HQ, rule.sinks_H.to(lse_HQ.dtype)[:, None])
    lse_HQ = lse_HQ.masked_fill(empty_Q, -torch.inf)
    weights_HQL = (scores_HQL - lse_HQ[..., None]).exp().masked_fill(~seen_QL, 0)
    out_KGQD = torch.einsum("kgql,lkd->kgqd", weights_HQL.unflatten(0, (num_kv_heads, group)), v_LKD)
    return out_KGQD.permute(2, 0, 1, 3).reshape(num_rows, num_heads, v_head_dim), lse_HQ.T


def paged_keys(cache_NSKD: torch.Tensor, block_ids: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Tokens first .. end of one request [L, K, D], gathered from its row of the block table."""
    block_size = cache_NSKD.shape[1]
    first_block = first // block_size
    ids = block_ids[first_block : -(-end // block_size)].to(torch.int64)
    tokens = indexable(cache_NSKD)[ids].flatten(0, 1).view(cache_NSKD.dtype)  # flattened as bytes: torch is slow in fp8
    return tokens[first - first_block * block_size : end - first_block * block_size]


def spans(meta: AttentionMetadata) -> list[tuple[int, int, int, int]]:
    """(request, first row, end row, KV length) of the requests that have rows."""
    starts = meta.query_start_loc[: meta.num_requests + 1].tolist()
    lengths = meta.seq_lens[: meta.num_requests].tolist()
    return [(b, starts[b], starts[b + 1], lengths[b]) for b in range(meta.num_requests) if starts[b] < starts[b + 1]]


def paged_attention(
    q_THD: torch.Tensor,
    kv: KVCache,
    plan: StepPlan,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    rule = Rule(softmax_scale, causal, window, softcap, sinks_H, alibi_slopes_H)
    key_NSKD, value_NSKD = views(kv)
    acc = accumulator(q_THD, key_NSKD)
    for b, start, end, length in spans(plan.meta):
        block_ids = plan.meta.block_table[b]
        for row in range(start, end, TILE_ROWS):
            tile = slice(row, min(row + TILE_ROWS, end))
            position = length - (end - row)
            first, stop = rule.keys(position, tile, length)
            k_LKD = _scaled(widened(paged_keys(key_NSKD, block_ids, first, stop), acc), k_scale)
            v_LKD = _scaled(widened(paged_keys(value_NSKD, block_ids, first, stop), acc), v_scale)
            _write(attend(q_THD[tile], k_LKD, v_LKD, rule, first_row=position, first_key=first), tile, out, lse)


def attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    query_start_loc: torch.Tensor,
    kv_start_loc: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    causal: bool = True,
    softmax_scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
) -> None:
    rule = Rule(softmax_scale, causal, window, softcap, sinks_H)
    acc = accumulator(q_THD, k_SKD)
    rows, keys = query_start_loc.tolist(), kv_start_loc.tolist()
    for b in range(len(rows) - 1):
        length = keys[b + 1] - keys[b]
        for row in range(rows[b], rows[b + 1], TILE_ROWS):
            tile = slice(row, min(row + TILE_ROWS, rows[b + 1]))
            position = length - (rows[b + 1] - row)
            first, stop = rule.keys(position, tile, length)
            span = slice(keys[b] + first, keys[b] + stop)
            k_LKD, v_LKD = k_SKD[span].to(acc), v_SKD[span].to(acc)
            part = attend(q_THD[tile], k_LKD, v_LKD, rule, first_row=position, first_key=first)
            _write(part, tile, out, lse)


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """A part whose log-sum-exp is -inf is dropped by select, whatever its values; two such parts give 0."""
    acc = accumulator(out_a, out_b, lse_a, lse_b)
    total_TH = torch.logaddexp(lse_a.to(acc), lse_b.to(acc))
    merged = torch.zeros(out.shape, dtype=acc, device=out.device)
    for part_THD, part_lse_TH in ((out_a, lse_a), (out_b, lse_b)):
        weight_TH1 = (part_lse_TH.to(acc) - total_TH).exp()[..., None]
        merged += torch.where(part_lse_TH[..., None] == -torch.inf, 0.0, weight_TH1 * part_THD.to(acc))
    out.copy_(merged)
    if lse is not None:
        lse.copy_(total_TH)


def _scaled(x_LKD: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return x_LKD if scale is None else x_LKD * per_head(scale).to(x_LKD.dtype)


def _write(part: tuple[torch.Tensor, torch.Tensor], rows: slice, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out[rows].copy_(part[0])
    if lse is not None:
        lse[rows].copy_(part[1])
