"""The specs of ops on a layer's KV cache, as the cache's own spec and layout say them."""

from __future__ import annotations

from typing import Any

import torch

from octavo.core.backend.kv import KVCache
from octavo.core.backend.specs import AttentionSpec, CacheSpec


def cache_spec(cache: KVCache, x_dtype: torch.dtype, **others: Any) -> CacheSpec:
    """Of an op that writes or moves what is in `cache`; `others` are the fields that its cache does not tell."""
    spec = cache.spec
    return CacheSpec(
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        x_dtype=x_dtype,
        kv_dtype=spec.dtype,
        block_size=spec.block_size,
        layout=cache.layout,
        **others,
    )


def attention_spec(cache: KVCache, num_heads: int, q_dtype: torch.dtype, **others: Any) -> AttentionSpec:
    """Of attention over `cache`; `others` are the fields that its cache does not tell, or tells otherwise."""
    spec = cache.spec
    fields: dict[str, Any] = {
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "kv_dtype": spec.dtype,
        "block_size": spec.block_size,
        "layout": cache.layout,
        "window": spec.window,
    }
    return AttentionSpec(num_heads=num_heads, q_dtype=q_dtype, **fields | others)
