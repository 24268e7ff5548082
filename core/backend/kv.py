"""What the KV cache looks like to a backend, and what one step tells it about a batch.

Shape letters: N blocks, S slots of a block, K KV heads, D head dim, B requests, T tokens of a step.

    slot = block_id * block_size + offset          one slot = one token of one layer: K [K, D] and V [K, D]

    KVPool   raw bytes [num_blocks, block_bytes]; one pool per layer slot, allocated by the backend
    KVCache  one layer's typed view of its pool: key [N, S, K, D] and value [N, S, K, D], any strides

A cache of one byte an element holds codes, x = code * scale, with a scale of K and one of V for the layer or for each
head. 8-bit floats take scale 1 where none is given. int8 means nothing without one: its codes are -127 .. 127.

Layers that share a KVCacheSpec form groups of equal layer count; layer i of every group views pool i, and a
block id belongs to one group at a time, so one free list serves them all. Only the engine decides how many
blocks there are, only the backend decides where their bytes lie, and only ops read or write them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch


class KVLayout(enum.StrEnum):
    """Order of a block's bytes. The views of a KVCache have the same axes in each; only strides differ.

        one head's keys of a block     HND  t0 d0 d1 d2 d3 │ t1 d0 d1 d2 d3 │ …      a row is a key
        (S tokens t, D elements d)     HDN  d0 t0 t1 t2 t3 │ d1 t0 t1 t2 t3 │ …      a row is one element of all keys

    HDN serves vector units: they load one element of many keys at once and multiply it with the query's. Nothing is
    transposed and nothing summed across lanes. Values are summed over tokens and so stay in rows.
    """

    NHD = "NHD"  # [num_blocks, block_size, kv_heads, head_dim]
    HND = "HND"  # [num_blocks, kv_heads, block_size, head_dim]
    HDN = "HDN"  # keys [num_blocks, kv_heads, head_dim, block_size], values as in HND
    MLA = "MLA"  # [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], no separate value


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Everything about a layer that decides the size, content or lifetime of its blocks.

    Attributes:
        num_kv_heads: KV heads on this rank.
        head_dim: elements of one key head (MLA: kv_lora_rank + qk_rope_head_dim).
        v_head_dim: elements of one value head (MLA: 0, the value is a part of the latent).
        dtype: of the stored elements.
        block_size: tokens of a block.
        window: a query sees itself and window - 1 tokens before it; None sees all.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    block_size: int
    window: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer."""
        return self.block_size * self.token_bytes


@dataclass(frozen=True, slots=True)
class KVPool:
    """The bytes behind one layer slot. `storage` is the backend's own object."""

    num_blocks: int
    block_bytes: int
    storage: Any


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's view of its pool.

    Attributes:
        key_NSKD, value_NSKD: views with any strides; the last is 1 but for keys in HDN, which have 1 on S. MLA keeps
            its latent in key with K = 1 and an empty value. A device without torch memory leaves both None and
            implements every cache op.
    """

    spec: KVCacheSpec
    layout: KVLayout
    num_blocks: int
    key_NSKD: torch.Tensor | None
    value_NSKD: torch.Tensor | None
    storage: Any = None


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's batch as one KV group sees it. Requests are ragged: prefill, chunks and decode mix.

    Attributes:
        num_requests, num_tokens: B and T, without padding.
        max_query_len, max_seq_len: the largest query and KV length in the batch, in tokens.
        query_start_loc: [B + 1] int32; request b's queries are rows query_start_loc[b] .. query_start_loc[b + 1].
        seq_lens: [B] int32; KV length including this step's tokens.
        block_table: [B, max_blocks] int32; padding and blocks that left a window hold valid ids of any block.
        slot_mapping: [T] int64; where each token's K and V go; -1 writes nothing.
        block_size: tokens of a block in this group.
        num_fresh: requests of 2 tokens or more that have no keys but this step's. 0 where it is not told: where shapes
            are padded, since a recorded step can't go another way by it, and where no bit of a reply may depend on how
            its prompt is cut.

    Where a device takes only token buckets the tensors are longer than B and T: padding requests have no queries and
    length 0 (query_start_loc repeats T), padding tokens belong to no request and have slot -1.
    """

    num_requests: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    num_fresh: int = 0


def torch_kv_view(pool: KVPool, spec: KVCacheSpec, layout: KVLayout) -> KVCache:
    """A layer's view of a pool whose storage is a flat uint8 tensor of num_blocks * block_bytes.

        one block:  | K part | V part | padding to block_bytes |      each part in the layout's order

    Raises ValueError when the spec's blocks do not fit the pool's.
    """
    if spec.block_bytes > pool.block_bytes or pool.block_bytes % spec.dtype.itemsize:
        raise ValueError(
            f"blocks of {spec.block_bytes} bytes of {spec.dtype} do not fit a pool of blocks of {pool.block_bytes}"
        )
    block_stride = pool.block_bytes // spec.dtype.itemsize
    storage: torch.Tensor = pool.storage
    flat = storage[: pool.num_blocks * pool.block_bytes].view(spec.dtype)
    first = int(flat.storage_offset())  # as_strided counts from the memory's beginning, not the tensor's
    S, K = spec.block_size, spec.num_kv_heads

    def view(head_dim: int, offset: int, order: KVLayout) -> torch.Tensor:
        slot, head, element = K * head_dim, head_dim, 1
        if order is KVLayout.HND:
            slot, head = head_dim, S * head_dim
        elif order is KVLayout.HDN:
            slot, head, element = 1, S * head_dim, S
        return flat.as_strided((pool.num_blocks, S, K, head_dim), (block_stride, slot, head, element), first + offset)

    key_NSKD = view(spec.head_dim, 0, layout)
    value_order = KVLayout.HND if layout is KVLayout.HDN else layout
    value_NSKD = view(spec.v_head_dim, S * K * spec.head_dim if spec.v_head_dim else 0, value_order)
    return KVCache(spec, layout, pool.num_blocks, key_NSKD, value_NSKD, pool.storage)
