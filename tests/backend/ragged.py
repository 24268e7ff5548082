"""Random ragged batches over a paged cache whose unused slots are poisoned, and an oracle that shares no code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from octavo.core.backend import AttentionMetadata, KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view


@dataclass(frozen=True)
class Ragged:
    """A step's batch: request b has query_lens[b] new tokens and kv_lens[b] tokens in all.

    Attributes:
        key, value: per request [kv_len, K, D], what its cache holds.
    """

    meta: AttentionMetadata
    kv: KVCache
    query_lens: list[int]
    kv_lens: list[int]
    key: list[torch.Tensor]
    value: list[torch.Tensor]


def make_cache(num_blocks: int, spec: KVCacheSpec, layout: KVLayout, *, fill: float = math.nan) -> KVCache:
    """A cache of its own pool, every element set to `fill`; blocks are padded so that their stride is odd."""
    block_bytes = spec.block_bytes + 3 * spec.dtype.itemsize
    pool = KVPool(num_blocks, block_bytes, torch.zeros(num_blocks * block_bytes, dtype=torch.uint8))
    cache = torch_kv_view(pool, spec, layout)
    for view in (cache.key_NSKD, cache.value_NSKD):
        assert view is not None
        view.copy_(torch.full(view.shape, fill))
    return cache


def make_ragged(
    query_lens: list[int],
    kv_lens: list[int],
    spec: KVCacheSpec,
    layout: KVLayout = KVLayout.HND,
    *,
    generator: torch.Generator,
) -> Ragged:
    """Shuffled blocks; table padding and block 0 hold NaN; each request's tokens are written slot by slot."""
    S = spec.block_size
    counts = [-(-length // S) for length in kv_lens]
    num_blocks = sum(counts) + 3
    cache = make_cache(num_blocks, spec, layout)
    assert cache.key_NSKD is not None
    assert cache.value_NSKD is not None
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    width = max([*counts, 1]) + 1
    poisoned = free[-1]
    table = torch.full((len(kv_lens), width), poisoned, dtype=torch.int32)
    keys, values, slots = [], [], []
    for b, (length, count) in enumerate(zip(kv_lens, counts, strict=True)):
        blocks = [free.pop(0) for _ in range(count)]
        table[b, :count] = torch.tensor(blocks, dtype=torch.int32)
        key = torch.randn(length, spec.num_kv_heads, spec.head_dim, generator=generator).to(spec.dtype)
        value = torch.randn(length, spec.num_kv_heads, spec.v_head_dim, generator=generator).to(spec.dtype)
        for t in range(length):
            cache.key_NSKD[blocks[t // S], t % S] = key[t]
            cache.value_NSKD[blocks[t // S], t % S] = value[t]
        keys.append(key)
        values.append(value)
        slots += [blocks[t // S] * S + t % S if t >= 0 else -1 for t in range(length - query_lens[b], length)]
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    meta = AttentionMetadata(
        num_requests=len(kv_lens),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(kv_lens),
        query_start_loc=starts,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        block_size=S,
    )
    return Ragged(meta, cache, query_lens, kv_lens, keys, values)


def attention_oracle(
    q_THD: torch.Tensor,
    batch: Ragged,
    *,
    softmax_scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, H, Dv] and lse [T, H] in fp64: one query row, one head at a time, straight from the definition."""
    heads = q_THD.shape[1]
    outs, lses = [], []
    row = 0
    for query_len, kv_len, key, value in zip(batch.query_lens, batch.kv_lens, batch.key, batch.value, strict=True):
        for i in range(query_len):
            position = kv_len - query_len + i
            for h in range(heads):
                head = h * key.shape[1] // heads
                k_scale_h = 1.0 if k_scale is None else float(k_scale.flatten()[head % k_scale.numel()])
                v_scale_h = 1.0 if v_scale is None else float(v_scale.flatten()[head % v_scale.numel()])
                seen = [
                    j
                    for j in range(kv_len)
                    if not (causal and j > position) and not (window is not None and j <= position - window)
                ]
                if not seen:
                    outs.append(torch.zeros(value.shape[-1], dtype=torch.float64))
                    lses.append(-math.inf)
                    continue
                scores = key[seen, head].double() @ q_THD[row, h].double() * k_scale_h * softmax_scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if alibi_slopes_H is not None:
                    scores = scores + float(alibi_slopes_H[h]) * torch.tensor(
                        [j - position for j in seen], dtype=torch.float64
                    )
                total = scores.exp().sum()
                if sinks_H is not None:
                    total = total + sinks_H[h].double().exp()
                outs.append((scores.exp() / total) @ value[seen, head].double() * v_scale_h)
                lses.append(float(total.log()))
            row += 1
    shape = (row, heads)
    out = torch.stack(outs).reshape(*shape, -1) if outs else torch.zeros(0, heads, 1, dtype=torch.float64)
    return out, torch.tensor(lses, dtype=torch.float64).reshape(shape)
