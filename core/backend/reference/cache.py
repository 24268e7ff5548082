"""Writes, copies and transfers of KV blocks.

Shape letters: N blocks, S slots of a block, K KV heads, D head dim, T tokens, C copies.

    slot = block_id * S + offset        K and V of one token: key[block_id, offset], value[block_id, offset]

Ids are int64 all the way: block_id * block bytes passes 2^31 in pools of ordinary size.
"""

from __future__ import annotations

import torch

from octavo.core.backend.kv import KVCache
from octavo.core.backend.reference.numeric import FP8_DTYPES, accumulator, rounded
from octavo.core.backend.reference.rows import rotated


def views(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache's key and value views. Raises ValueError for a device without torch memory."""
    if kv.key_NSKD is None or kv.value_NSKD is None:
        raise ValueError("this KV cache has no torch view; its backend must implement the cache ops itself")
    return kv.key_NSKD, kv.value_NSKD


def indexable(x: torch.Tensor) -> torch.Tensor:
    """x, or its bytes where torch has no indexing for the dtype."""
    return x.view(torch.uint8) if x.dtype in FP8_DTYPES else x


def store(cache_NSKD: torch.Tensor, x_TKD: torch.Tensor, slots_T: torch.Tensor, scale: torch.Tensor | None) -> None:
    """cache[slot] = x / scale for the slots that are not negative. x may have more rows than there are slots."""
    kept = (slots_T >= 0).nonzero().squeeze(1)
    slots = slots_T[kept].to(torch.int64)
    x = x_TKD[kept]
    if scale is not None:
        acc = accumulator(x)
        x = x.to(acc) / per_head(scale).to(acc)
    block_size = cache_NSKD.shape[1]
    indexable(cache_NSKD)[slots // block_size, slots % block_size] = indexable(rounded(x, cache_NSKD.dtype))


def per_head(scale: torch.Tensor) -> torch.Tensor:
    """A scale of one element or [K], ready to be multiplied with [..., K, D]."""
    return scale if scale.numel() == 1 else scale[:, None]


def write_kv(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    kv: KVCache,
    slot_mapping_T: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    key_NSKD, value_NSKD = views(kv)
    store(key_NSKD, k_TKD, slot_mapping_T, k_scale)
    store(value_NSKD, v_TKD, slot_mapping_T, v_scale)


def rope_write_kv(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
    kv: KVCache,
    slot_mapping_T: torch.Tensor,
    *,
    out_q: torch.Tensor,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    cos_sin_TR = cos_sin_PR[positions_T]
    out_q.copy_(rotated(q_THD, cos_sin_TR, interleaved))
    # Rounded to k's dtype first, so that the fused op and its two parts store the same bits.
    turned_TKD = rotated(k_TKD, cos_sin_TR, interleaved).to(k_TKD.dtype)
    write_kv(turned_TKD, v_TKD, kv, slot_mapping_T, k_scale=k_scale, v_scale=v_scale)


def copy_blocks(kv: KVCache, source_destination: torch.Tensor) -> None:
    for source, destination in source_destination.tolist():
        for cache_NSKD in views(kv):
            cache_NSKD[destination].copy_(cache_NSKD[source])


def gather_blocks(kv: KVCache, block_ids: torch.Tensor, *, out_k: torch.Tensor, out_v: torch.Tensor) -> None:
    for cache_NSKD, out in zip(views(kv), (out_k, out_v), strict=True):
        indexable(out).copy_(indexable(cache_NSKD)[block_ids.to(torch.int64)])


def scatter_blocks(kv: KVCache, block_ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for cache_NSKD, x in zip(views(kv), (k, v), strict=True):
        indexable(cache_NSKD)[block_ids.to(torch.int64)] = indexable(x)
