"""Attention over blocks of keys with a running maximum, as kernels do it: other block sizes, orders and splits.

Scheme ── block     keys per step
       ├─ order     of the blocks: ahead, back, shuffled
       ├─ splits    parts of the keys with a softmax of their own, merged at the end
       ├─ rounds_p  probabilities are rounded to q's dtype before the second product, or stay fp32
       ├─ dims      elements of a head that are multiplied at a time; 0: all
       ├─ base_2    powers of 2 instead of e, log₂e folded into the scale: one rounding elsewhere
       ├─ scales_q  in fp32, before the product instead of after it
       └─ rounds_q  the scaled q to q's dtype: no honest variant, since the bounds assume that it stays fp32

Latent attention (mla_attention) is the same with one key head, whose values are the first elements of its keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from octavo.conformance.case import Case
from octavo.conformance.variants.base import Op, Variant
from octavo.core.backend import KVCache, StepPlan
from octavo.core.backend.reference.attention import Rule, paged_keys, spans
from octavo.core.backend.reference.cache import per_head, views

LOG2_E = 1.4426950408889634
LATENT_HEADS, LONGEST_LATENT = 8, 600


@dataclass(frozen=True)
class Scheme:
    """See the module's picture."""

    block: int = 64
    order: Literal["ahead", "back", "shuffled"] = "ahead"
    splits: int = 1
    rounds_p: bool = True
    dims: int = 0
    base_2: bool = False
    scales_q: bool = False
    rounds_q: bool = False

    def exp(self, x: torch.Tensor) -> torch.Tensor:
        """Of scores as this scheme keeps them."""
        return torch.exp2(x) if self.base_2 else x.exp()


@dataclass
class Part:
    """A running softmax: maximum [H, Q], sum [H, Q], and weighted values [H, Q, D], all fp32."""

    top: torch.Tensor
    mass: torch.Tensor
    total: torch.Tensor

    def rescaled(self, top: torch.Tensor, scheme: Scheme) -> Part:
        """The same under a larger maximum; an empty part stays empty."""
        factor = torch.where(self.top == -torch.inf, 0.0, scheme.exp(self.top - top))
        return Part(top, self.mass * factor, self.total * factor[..., None])


def paged_attention_with(scheme: Scheme) -> Op:
    """The contract's paged_attention, computed by a scheme."""

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
        for b, start, end, length in spans(plan.meta):
            rows, position = slice(start, end), length - (end - start)
            first, stop = rule.keys(position, rows, length)
            k, v = (
                paged_keys(cache, plan.meta.block_table[b], first, stop).float() for cache in (key_NSKD, value_NSKD)
            )
            k = k if k_scale is None else k * per_head(k_scale)
            v = v if v_scale is None else v * per_head(v_scale)
            result, result_lse = attend(q_THD[rows], k, v, rule, scheme, first_row=position, first_key=first)
            out[rows].copy_(result)
            if lse is not None:
                lse[rows].copy_(result_lse)

    return paged_attention


def attention_with(scheme: Scheme) -> Op:
    """The contract's attention over contiguous keys, computed by a scheme."""

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
        row_bounds, key_bounds = query_start_loc.tolist(), kv_start_loc.tolist()
        for b in range(len(row_bounds) - 1):
            rows, keys = slice(*row_bounds[b : b + 2]), slice(*key_bounds[b : b + 2])
            if rows.start == rows.stop:
                continue
            position = (keys.stop - keys.start) - (rows.stop - rows.start)
            first, stop = rule.keys(position, rows, keys.stop - keys.start)
            seen = slice(keys.start + first, keys.start + stop)
            k, v = k_SKD[seen].float(), v_SKD[seen].float()
            result, result_lse = attend(q_THD[rows], k, v, rule, scheme, first_row=position, first_key=first)
            out[rows].copy_(result)
            if lse is not None:
                lse[rows].copy_(result_lse)

    return attention


def mla_attention_with(scheme: Scheme) -> Op:
    """The contract's mla_attention, computed by a scheme."""

    def mla_attention(
        q_latent_THC: torch.Tensor,
        q_rope_THR: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float,
    ) -> None:
        rule, rank = Rule(softmax_scale), q_latent_THC.shape[-1]
        key_NSKD, _ = views(kv)
        q_THD = torch.cat((q_latent_THC, q_rope_THR), dim=-1)
        for b, start, end, length in spans(plan.meta):
            rows, position = slice(start, end), length - (end - start)
            _, stop = rule.keys(position, rows, length)
            k = paged_keys(key_NSKD, plan.meta.block_table[b], 0, stop).float()
            result, result_lse = attend(q_THD[rows], k, k[..., :rank], rule, scheme, first_row=position, first_key=0)
            out[rows].copy_(result)
            if lse is not None:
                lse[rows].copy_(result_lse)

    return mla_attention


def attend(
    q_QHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    rule: Rule,
    scheme: Scheme,
    *,
    first_row: int,
    first_key: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: out [Q, H, Dv] and log-sum-exp [Q, H], both fp32."""
    num_rows, num_heads, _ = q_QHD.shape
    group = num_heads // k_LKD.shape[1]
    k_HLD = k_LKD.repeat_interleave(group, dim=1).transpose(0, 1)
    v_HLD = v_LKD.repeat_interleave(group, dim=1).transpose(0, 1)
    q_HQD = q_QHD.float().transpose(0, 1)
    if scheme.rounds_q:
        q_HQD = (q_HQD * rule.softmax_scale).to(q_QHD.dtype).float()
        rule = replace(rule, softmax_scale=1.0)
    rows_Q = torch.arange(first_row, first_row + num_rows)
    starts = _ordered(list(range(0, k_LKD.shape[0], scheme.block)), scheme)
    parts = []
    for split in range(scheme.splits):
        part = _empty(num_heads, num_rows, v_LKD.shape[2])
        for start in starts[split :: scheme.splits]:
            span = slice(start, min(start + scheme.block, k_LKD.shape[0]))
            keys_L = torch.arange(first_key + span.start, first_key + span.stop)
            scores = _scores(q_HQD, k_HLD[:, span], rule, scheme, rows_Q, keys_L)
            part = _step(part, scores, v_HLD[:, span], q_QHD.dtype if scheme.rounds_p else torch.float32, scheme)
        parts.append(part)
    return _finished(parts, rule, scheme)


def _ordered(starts: list[int], scheme: Scheme) -> list[int]:
    if scheme.order == "back":
        return starts[::-1]
    return starts[1::2] + starts[0::2] if scheme.order == "shuffled" else starts


def _empty(num_heads: int, num_rows: int, dim: int) -> Part:
    return Part(
        torch.full((num_heads, num_rows), -torch.inf),
        torch.zeros(num_heads, num_rows),
        torch.zeros(num_heads, num_rows, dim),
    )


def _scores(
    q_HQD: torch.Tensor, k_HLD: torch.Tensor, rule: Rule, scheme: Scheme, rows_Q: torch.Tensor, keys_L: torch.Tensor
) -> torch.Tensor:
    """[H, Q, L], in powers of the scheme's base."""
    is_plain = rule.softcap is None and rule.alibi_slopes_H is None
    # Softcap and ALiBi come after the scale and before the change of base, which can be folded in only without them.
    fold = LOG2_E if scheme.base_2 and is_plain else 1.0
    scale = rule.softmax_scale * fold
    if scheme.scales_q:
        scores = _product(q_HQD * scale, k_HLD, scheme)
    else:
        scores = _product(q_HQD, k_HLD, scheme) * scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.alibi_slopes_H is not None:
        scores = scores + rule.alibi_slopes_H.float()[:, None, None] * (keys_L - rows_Q[:, None])
    if scheme.base_2 and not is_plain:
        scores = scores * LOG2_E
    return scores.masked_fill(~rule.visible(rows_Q, keys_L), -torch.inf)


def _product(q_HQD: torch.Tensor, k_HLD: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """q · k, some elements of a head at a time."""
    width = q_HQD.shape[-1]
    step = scheme.dims or width
    parts = [
        q_HQD[..., start : start + step] @ k_HLD[..., start : start + step].transpose(1, 2)
        for start in range(0, width, step)
    ]
    return sum(parts[1:], parts[0])


def _step(part: Part, scores_HQL: torch.Tensor, v_HLD: torch.Tensor, p_dtype: torch.dtype, scheme: Scheme) -> Part:
    part = part.rescaled(torch.maximum(part.top, scores_HQL.amax(dim=-1)), scheme)
    weights = torch.where(scores_HQL == -torch.inf, 0.0, scheme.exp(scores_HQL - part.top[..., None]))
    total = part.total + weights.to(p_dtype).float() @ v_HLD
    return Part(part.top, part.mass + weights.sum(dim=-1), total)


def _finished(parts: list[Part], rule: Rule, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    base = LOG2_E if scheme.base_2 else 1.0
    top = torch.stack([part.top for part in parts]).amax(dim=0)
    merged = [part.rescaled(top, scheme) for part in parts]
    whole = Part(
        top, sum((p.mass for p in merged[1:]), merged[0].mass), sum((p.total for p in merged[1:]), merged[0].total)
    )
    empty = whole.mass == 0
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.float()[:, None] * base
        whole = whole.rescaled(torch.maximum(whole.top, sinks), scheme)
        whole.mass = whole.mass + scheme.exp(sinks - whole.top)
    out = torch.where(empty[..., None], 0.0, whole.total / whole.mass[..., None])
    lse = torch.where(empty, -torch.inf, whole.top / base + whole.mass.log())
    return out.transpose(0, 1), lse.T


def _variant(name: str, what: str, scheme: Scheme) -> Variant:
    ops = {
        "paged_attention": paged_attention_with(scheme),
        "attention": attention_with(scheme),
    }
    return Variant(f"attention-{name}", what, tuple(ops), ops)


def _mla_variant(name: str, what: str, scheme: Scheme) -> Variant:
    op = mla_attention_with(scheme)
    return Variant(f"mla-{name}", what, ("mla_attention",), {"mla_attention": op}, alter=_few_heads)


def _few_heads(case: Case) -> Case | None:
    """More heads are more of the same to these schemes, which treat each alone, and long contexts take the time."""
    heads, context = int(case.axes["heads"]), int(case.axes.get("context", "0"))
    return case if heads == LATENT_HEADS and context <= LONGEST_LATENT else None


VARIANTS = (
    _variant("blocks-64", "a running softmax over blocks of 64 keys, P rounded", Scheme()),
    _variant("blocks-17", "blocks of 17 keys", Scheme(block=17)),
    _variant("back", "the last block first", Scheme(block=32, order="back")),
    _variant("shuffled", "odd blocks before even ones", Scheme(block=16, order="shuffled")),
    _variant("split-3", "keys split in three, merged at the end", Scheme(block=32, splits=3)),
    _variant("split-16", "keys split in sixteen, some of them empty", Scheme(block=16, splits=16)),
    _variant("fp32-p", "probabilities stay fp32", Scheme(rounds_p=False)),
    _variant("base-2", "powers of 2, log2(e) in the scale", Scheme(base_2=True)),
    _variant("scaled-q", "q scaled in fp32 before the product", Scheme(scales_q=True, rounds_p=False)),
    _variant("dims-16", "16 elements of a head at a time", Scheme(dims=16, splits=2)),
    _mla_variant("blocks-64", "latents in blocks of 64 keys, P rounded", Scheme()),
    _mla_variant("split-3", "latents split in three, probabilities fp32", Scheme(block=32, splits=3, rounds_p=False)),
    _mla_variant("dims-64", "64 elements of latent and rotary key at a time", Scheme(dims=64, base_2=True)),
)
