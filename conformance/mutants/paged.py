"""What faults of paged ops are made of: other metadata, other views, a copy of the blocks that a call reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from octavo.conformance.mutants.base import Call
from octavo.core.backend import AttentionMetadata, KVCache, StepPlan

SPLIT_KEYS = 32
"""Faults of kernels that split a long context show beyond this many keys."""


def change_meta(call: Call, **fields: Any) -> None:
    """Replace fields of the step's metadata."""
    call["plan"] = StepPlan(replace(call["plan"].meta, **fields))


def query_lens(meta: AttentionMetadata) -> torch.Tensor:
    """Rows of each request, [B]."""
    return meta.query_start_loc[: meta.num_requests + 1].diff()


def seq_lens(meta: AttentionMetadata) -> torch.Tensor:
    """KV length of each request, [B], a copy."""
    return meta.seq_lens[: meta.num_requests].clone()


def rows_of(meta: AttentionMetadata, chosen_B: torch.Tensor) -> torch.Tensor:
    """Rows that belong to the chosen requests."""
    return chosen_B.repeat_interleave(query_lens(meta).long()).nonzero().squeeze(1)


def table(meta: AttentionMetadata) -> torch.Tensor:
    """The block table, a copy [B, W]."""
    return meta.block_table[: meta.num_requests].clone()


def change_views(call: Call, key: torch.Tensor, value: torch.Tensor, **fields: Any) -> None:
    """Let the op see other tensors as its cache."""
    call["kv"] = replace(call["kv"], key_NSKD=key, value_NSKD=value, **fields)


def views(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache's two views, which a host always has."""
    key, value = kv.key_NSKD, kv.value_NSKD
    if key is None or value is None:
        raise ValueError("mutants run on a host backend, whose caches have torch views")
    return key, value


def own_blocks(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the call copies of the blocks in its table, to be written into: key and value [B · W, S, K, D].

    Entry (b, i) of the table is block b · W + i of them.
    """
    meta = call["plan"].meta
    ids = table(meta)
    key, value = (picked(x, ids.flatten()) for x in views(call["kv"]))
    change_views(call, key, value, num_blocks=ids.numel())
    change_meta(call, block_table=torch.arange(ids.numel(), dtype=torch.int32).view(ids.shape))
    return key, value


def picked(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Blocks of a view, copied. By bytes: torch can't index 8-bit floats."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8)[ids.long()].view(x.dtype)
    return x[ids.long()]
