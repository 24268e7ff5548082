"""Attention over a paged cache, over contiguous keys, over latents; writes into the cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend.kv import AttentionMetadata, KVCacheSpec, KVLayout
from octavo.core.backend.specs import AttentionSpec, CacheSpec
from octavo.core.backend.workloads.base import F32, INT32, INT64, Cost, Prepared, Tensors, Workload, operand


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of a model: query heads, KV heads, head size, and what it does besides."""

    H: int
    K: int
    D: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests of one length: `query` new tokens each, `context` in all."""

    requests: int
    query: int
    context: int
    block_size: int = 16

    @property
    def tokens(self) -> int:
        return self.requests * self.query

    @property
    def num_blocks(self) -> int:
        return self.requests * -(-self.context // self.block_size)

    def meta(self, tensors: Tensors) -> AttentionMetadata:
        """Blocks in shuffled order, as they lie after a while of serving."""
        table = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).to(INT32)
        slots = torch.arange(self.tokens, dtype=INT64)
        return AttentionMetadata(
            num_requests=self.requests,
            num_tokens=self.tokens,
            max_query_len=self.query,
            max_seq_len=self.context,
            query_start_loc=tensors.of(torch.arange(0, self.tokens + 1, self.query, dtype=INT32)),
            seq_lens=tensors.of(torch.full((self.requests,), self.context, dtype=INT32)),
            block_table=tensors.of(table.view(self.requests, -1)),
            slot_mapping=tensors.of(slots % (self.num_blocks * self.block_size)),
            block_size=self.block_size,
        )

    def pairs(self, window: int | None) -> int:
        """Pairs of a query and a key that it sees, over the batch."""
        widths = range(self.context - self.query + 1, self.context + 1)
        return self.requests * sum(min(width, window or width) for width in widths)


LLAMA8B = Heads(32, 8, 128)
GEMMA = Heads(8, 4, 256, window=4096, softcap=50.0)
SINKS = Heads(64, 8, 64, window=128, has_sinks=True)
DECODE, LONG, DRAFTS, CHUNK = Batch(64, 1, 4096), Batch(4, 1, 32768), Batch(64, 4, 4096), Batch(2, 2048, 8192)


def list_workloads(dtype: torch.dtype, fp8: torch.dtype | None) -> Iterator[Workload]:
    yield _paged("llama8b-decode", LLAMA8B, DECODE, dtype)
    yield _paged("llama8b-long", LLAMA8B, LONG, dtype)
    yield _paged("llama8b-drafts", LLAMA8B, DRAFTS, dtype)
    yield _paged("llama8b-chunk", LLAMA8B, CHUNK, dtype)
    yield _paged("gemma-decode", GEMMA, DECODE, dtype)
    yield _paged("gemma-chunk", GEMMA, CHUNK, dtype)
    yield _paged("sinks-decode", SINKS, DECODE, dtype)
    yield _paged("sinks-chunk", SINKS, CHUNK, dtype)
    if fp8 is not None:
        yield _paged("llama8b-decode-fp8", LLAMA8B, DECODE, dtype, fp8)
        yield _paged("llama8b-chunk-fp8", LLAMA8B, CHUNK, dtype, fp8)
    yield _contiguous("deepseek-prefill", dtype, Heads(16, 16, 192), 4096, v_head_dim=128)
    yield _latent("deepseek-decode", dtype, Batch(64, 1, 4096, 64))
    yield _latent("deepseek-drafts", dtype, Batch(64, 2, 4096, 64))
    yield _write("llama8b-write-m64", 64, dtype)
    yield _write("llama8b-write-m4096", 4096, dtype)
    if fp8 is not None:
        yield _write("llama8b-write-fp8-m4096", 4096, dtype, fp8)


def _paged(name: str, heads: Heads, batch: Batch, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Workload:
    H, K, D = heads.H, heads.K, heads.D
    kv_dtype = kv_dtype or dtype
    kv_spec = KVCacheSpec(K, D, D, kv_dtype, batch.block_size, heads.window)
    has_scale = kv_dtype.itemsize == 1

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        scale = tensors.of(torch.ones(1)) if has_scale else None
        return functools.partial(
            ops.paged_attention,
            tensors.normal(batch.tokens, H, D),
            tensors.kv(kv_spec, batch.num_blocks),
            ops.plan(batch.meta(tensors)),
            out=tensors.empty(batch.tokens, H, D),
            softmax_scale=D**-0.5,
            window=heads.window,
            softcap=heads.softcap,
            sinks_H=tensors.normal(H, dtype=F32) if heads.has_sinks else None,
            k_scale=scale,
            v_scale=scale,
        )

    spec = AttentionSpec(
        H, K, D, D, dtype, kv_dtype, batch.block_size, KVLayout.NHD, window=heads.window,
        softcap=heads.softcap is not None, sinks=heads.has_sinks, kv_scale="tensor" if has_scale else "none",
    )  # fmt: skip
    keys = min(batch.context, batch.query - 1 + (heads.window or batch.context))
    moved = batch.requests * keys * kv_spec.token_bytes + 2 * batch.tokens * H * D * dtype.itemsize
    cost = Cost(moved, {operand(dtype): 4.0 * batch.pairs(heads.window) * H * D})
    return Workload(name, "paged_attention", spec, prepare, cost, wide_loads=True, from_memory=True)


def _contiguous(name: str, dtype: torch.dtype, heads: Heads, tokens: int, *, v_head_dim: int) -> Workload:
    H, D = heads.H, heads.D

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        starts = tensors.of(torch.tensor([0, tokens], dtype=INT32))
        return functools.partial(
            ops.attention,
            tensors.normal(tokens, H, D),
            tensors.normal(tokens, H, D),
            tensors.normal(tokens, H, v_head_dim),
            starts,
            starts,
            out=tensors.empty(tokens, H, v_head_dim),
            lse=tensors.empty(tokens, H, dtype=F32),
            softmax_scale=D**-0.5,
        )

    spec = AttentionSpec(H, H, D, v_head_dim, dtype, dtype, 1, KVLayout.NHD)
    moved = tokens * H * (2 * D + 2 * v_head_dim) * dtype.itemsize
    cost = Cost(moved, {operand(dtype): 2.0 * (tokens * (tokens + 1) // 2) * H * (D + v_head_dim)})
    return Workload(name, "attention", spec, prepare, cost, wide_loads=True)


def _latent(name: str, dtype: torch.dtype, batch: Batch) -> Workload:
    H, C, R = 16, 512, 64
    kv_spec = KVCacheSpec(1, C + R, 0, dtype, batch.block_size)

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.mla_attention,
            tensors.normal(batch.tokens, H, C),
            tensors.normal(batch.tokens, H, R),
            tensors.kv(kv_spec, batch.num_blocks),
            ops.plan(batch.meta(tensors)),
            out=tensors.empty(batch.tokens, H, C),
            softmax_scale=192**-0.5,
        )

    spec = AttentionSpec(H, 1, C + R, C, dtype, dtype, batch.block_size, KVLayout.MLA)
    moved = batch.requests * batch.context * kv_spec.token_bytes + batch.tokens * H * (2 * C + R) * dtype.itemsize
    cost = Cost(moved, {operand(dtype): 2.0 * batch.pairs(None) * H * (2 * C + R)})
    return Workload(name, "mla_attention", spec, prepare, cost, wide_loads=True, from_memory=True)


def _write(name: str, tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> Workload:
    H, K, D, positions, blocks = LLAMA8B.H, LLAMA8B.K, LLAMA8B.D, 8192, 4096
    kv_dtype = kv_dtype or dtype
    kv_spec = KVCacheSpec(K, D, D, kv_dtype, 16)
    has_scale = kv_dtype.itemsize == 1

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        q, k, v = (tensors.normal(tokens, heads, D) for heads in (H, K, K))
        scale = tensors.of(torch.ones(1)) if has_scale else None
        return functools.partial(
            ops.rope_write_kv,
            q,
            k,
            v,
            tensors.of(torch.arange(tokens) % positions),
            tensors.normal(positions, D, dtype=F32),
            tensors.make_kv(kv_spec, blocks),
            tensors.of(torch.arange(tokens)),
            out_q=tensors.empty(tokens, H, D),
            k_scale=scale,
            v_scale=scale,
        )

    spec = CacheSpec(
        K, D, D, dtype, kv_dtype, 16, KVLayout.NHD, "tensor" if has_scale else "none", num_heads=H, rotary_dim=D
    )
    moved = tokens * ((2 * H + 2 * K) * D * dtype.itemsize + kv_spec.token_bytes + D * 4)
    return Workload(name, "rope_write_kv", spec, prepare, Cost(moved))
