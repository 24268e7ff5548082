"""Calls of ops at the shapes of models that people run, on tensors without data: what is built ahead of time.

    llama8b     32 query heads over 8 KV heads of 128      gemma       heads of 256, window and softcap
    sinks       64 heads of 64 with sinks, window 128      deepseek    latent attention, 16 heads a rank
    qwen-moe    128 experts, 8 of them for a token         m64         64 tokens at once

A scenario speaks the contract and nothing else, so that it serves every backend. Its cost is what the call must move
and multiply at the least, for the roofline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.backends.common.cost import Cost
from octavo.core.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheSpec,
    Epilogue,
    Gate,
    GemmSpec,
    GroupedGemmSpec,
    KVCache,
    KVCacheSpec,
    KVLayout,
    KVPool,
    LoraSpec,
    OpSpec,
    QuantFormat,
    QuantScheme,
    RowSpec,
    WeightSpec,
    torch_kv_view,
)

BF16, F32, INT32, INT64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One call.

    Attributes:
        name: stable; a part of a build's name.
        spec: what `supports` is asked first: a scenario that a backend refuses is none of its builds.
        call: makes the call on the ops of a backend whose tensors lie on the meta device.
        cost: of the call.
        wide_loads: its speed hangs on loads of 16 bytes.
    """

    name: str
    op: str
    spec: OpSpec
    call: Callable[[Any], None]
    cost: Cost
    wide_loads: bool = False


def scenarios(fp8: torch.dtype) -> Iterator[Scenario]:
    """All of them; fp8 is the chip's 8-bit float."""
    yield from _attention(fp8)
    yield from _latent_attention()
    yield from _cache(fp8)
    yield from _products(fp8)
    yield from _experts()
    yield from _rows(fp8)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device=META)


# -- attention --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention of a model."""

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

    def meta(self) -> AttentionMetadata:
        table = -(-self.context // self.block_size)
        return AttentionMetadata(
            num_requests=self.requests,
            num_tokens=self.tokens,
            max_query_len=self.query,
            max_seq_len=self.context,
            query_start_loc=empty(self.requests + 1, dtype=INT32),
            seq_lens=empty(self.requests, dtype=INT32),
            block_table=empty(self.requests, table, dtype=INT32),
            slot_mapping=empty(self.tokens, dtype=INT64),
            block_size=self.block_size,
        )


LLAMA8B, GEMMA, SINKS = (
    Heads(32, 8, 128),
    Heads(8, 4, 256, window=4096, softcap=50.0),
    Heads(64, 8, 64, 128, None, True),
)
DECODE, LONG, DRAFTS, CHUNK = Batch(64, 1, 4096), Batch(4, 1, 32768), Batch(64, 4, 4096), Batch(2, 2048, 8192)


def _attention(fp8: torch.dtype) -> Iterator[Scenario]:
    for name, heads, batch, kv_dtype in (
        ("llama8b-decode", LLAMA8B, DECODE, BF16),
        ("llama8b-long", LLAMA8B, LONG, BF16),
        ("llama8b-drafts", LLAMA8B, DRAFTS, BF16),
        ("llama8b-chunk", LLAMA8B, CHUNK, BF16),
        ("llama8b-decode-fp8", LLAMA8B, DECODE, fp8),
        ("llama8b-chunk-fp8", LLAMA8B, CHUNK, fp8),
        ("gemma-window-decode", GEMMA, DECODE, BF16),
        ("gemma-window-chunk", GEMMA, CHUNK, BF16),
        ("sinks-decode", SINKS, DECODE, BF16),
        ("sinks-chunk", SINKS, CHUNK, BF16),
    ):
        yield _paged(name, heads, batch, kv_dtype)
    yield _contiguous("deepseek-prefill", Heads(16, 16, 192), 4096, v_head_dim=128)


def kv_cache(spec: KVCacheSpec, num_blocks: int, layout: KVLayout) -> KVCache:
    """A layer's view of a pool without data."""
    storage = empty(num_blocks * spec.block_bytes, dtype=torch.uint8)
    return torch_kv_view(KVPool(num_blocks, spec.block_bytes, storage), spec, layout)


def _paged(name: str, heads: Heads, batch: Batch, kv_dtype: torch.dtype) -> Scenario:
    H, K, D = heads.H, heads.K, heads.D
    kv_spec = KVCacheSpec(K, D, D, kv_dtype, batch.block_size, heads.window)
    is_scaled = kv_dtype.itemsize == 1

    def call(ops: Any) -> None:
        scale = empty(1, dtype=F32) if is_scaled else None
        ops.paged_attention(
            empty(batch.tokens, H, D),
            kv_cache(kv_spec, batch.requests * batch.context // batch.block_size, KVLayout.NHD),
            ops.plan(batch.meta()),
            out=empty(batch.tokens, H, D),
            softmax_scale=D**-0.5,
            window=heads.window,
            softcap=heads.softcap,
            sinks_H=empty(H, dtype=F32) if heads.has_sinks else None,
            k_scale=scale,
            v_scale=scale,
        )

    spec = AttentionSpec(
        H, K, D, D, BF16, kv_dtype, batch.block_size, KVLayout.NHD, window=heads.window,
        softcap=heads.softcap is not None, sinks=heads.has_sinks, kv_scale="tensor" if is_scaled else "none",
    )  # fmt: skip
    seen = _keys_seen(batch, heads.window)
    keys_read = min(batch.context, batch.query - 1 + (heads.window or batch.context))
    moved = batch.requests * keys_read * kv_spec.token_bytes + 2 * batch.tokens * H * D * 2
    operand = "bfloat16"
    return Scenario(name, "paged_attention", spec, call, Cost(moved, {operand: 4.0 * seen * H * D}), wide_loads=True)


def _keys_seen(batch: Batch, window: int | None) -> int:
    """Pairs of a query and a key that it sees, over the batch."""
    first = batch.context - batch.query + 1
    widths = range(first, batch.context + 1)
    return batch.requests * sum(min(width, window or width) for width in widths)


def _contiguous(name: str, heads: Heads, tokens: int, *, v_head_dim: int) -> Scenario:
    H, D = heads.H, heads.D

    def call(ops: Any) -> None:
        starts = empty(2, dtype=INT32)
        ops.attention(
            empty(tokens, H, D), empty(tokens, H, D), empty(tokens, H, v_head_dim), starts, starts,
            out=empty(tokens, H, v_head_dim), lse=empty(tokens, H, dtype=F32), softmax_scale=D**-0.5,
        )  # fmt: skip

    spec = AttentionSpec(H, H, D, v_head_dim, BF16, BF16, 1, KVLayout.NHD)
    pairs = tokens * (tokens + 1) // 2
    moved = tokens * H * (2 * D + 2 * v_head_dim) * 2
    cost = Cost(moved, {"bfloat16": 2.0 * pairs * H * (D + v_head_dim)})
    return Scenario(name, "attention", spec, call, cost, wide_loads=True)


def _latent_attention() -> Iterator[Scenario]:
    H, C, R = 16, 512, 64
    for name, batch in (("deepseek-decode", Batch(64, 1, 4096, 64)), ("deepseek-drafts", Batch(64, 2, 4096, 64))):
        kv_spec = KVCacheSpec(1, C + R, 0, BF16, batch.block_size)

        def call(ops: Any, batch: Batch = batch, kv_spec: KVCacheSpec = kv_spec) -> None:
            ops.mla_attention(
                empty(batch.tokens, H, C),
                empty(batch.tokens, H, R),
                kv_cache(kv_spec, batch.requests * batch.context // batch.block_size, KVLayout.MLA),
                ops.plan(batch.meta()),
                out=empty(batch.tokens, H, C),
                softmax_scale=192**-0.5,
            )

        spec = AttentionSpec(H, 1, C + R, C, BF16, BF16, batch.block_size, KVLayout.MLA)
        moved = batch.requests * batch.context * kv_spec.token_bytes + batch.tokens * H * (2 * C + R) * 2
        flops = 2.0 * _keys_seen(batch, None) * H * (2 * C + R)
        yield Scenario(name, "mla_attention", spec, call, Cost(moved, {"bfloat16": flops}), wide_loads=True)


def _cache(fp8: torch.dtype) -> Iterator[Scenario]:
    heads = LLAMA8B
    for name, tokens, kv_dtype in (("decode", 64, BF16), ("chunk", 4096, BF16), ("chunk-fp8", 4096, fp8)):
        kv_spec = KVCacheSpec(heads.K, heads.D, heads.D, kv_dtype, 16)

        def call(
            ops: Any, tokens: int = tokens, kv_spec: KVCacheSpec = kv_spec, is_scaled: bool = kv_dtype is fp8
        ) -> None:
            q, k = empty(tokens, heads.H, heads.D), empty(tokens, heads.K, heads.D)
            scale = empty(1, dtype=F32) if is_scaled else None
            ops.rope_write_kv(
                q, k, k, empty(tokens, dtype=INT64), empty(131072, heads.D, dtype=F32),
                kv_cache(kv_spec, 4096, KVLayout.NHD), empty(tokens, dtype=INT64),
                out_q=q, k_scale=scale, v_scale=scale,
            )  # fmt: skip

        spec = CacheSpec(
            heads.K, heads.D, heads.D, BF16, kv_dtype, 16, KVLayout.NHD, "tensor" if kv_dtype is fp8 else "none",
            num_heads=heads.H, rotary_dim=heads.D,
        )  # fmt: skip
        moved = tokens * (2 * heads.H * heads.D * 2 + 2 * heads.K * heads.D * 2 + kv_spec.token_bytes + heads.D * 4)
        yield Scenario(f"llama8b-{name}", "rope_write_kv", spec, call, Cost(moved))


# -- products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Product:
    """out [tokens, N] = x [tokens, K] @ w.T."""

    tokens: int
    N: int
    K: int
    scheme: QuantScheme | None = None
    gate: Gate | None = None
    operand: str = "bfloat16"
    weight_bits: float = 16


def _products(fp8: torch.dtype) -> Iterator[Scenario]:
    fp8_format = QuantFormat.FP8_E4M3FN if fp8 is torch.float8_e4m3fn else QuantFormat.FP8_E4M3FNUZ
    block_fp8 = QuantScheme(fp8_format, 128, block_rows=128, activation=fp8_format, activation_group_size=128)
    row_fp8 = QuantScheme(fp8_format, activation=fp8_format)
    w8a8 = QuantScheme(QuantFormat.INT8, activation=QuantFormat.INT8)
    int4 = QuantScheme(QuantFormat.INT4, 128, symmetric=False)
    for tokens in (1, 16, 64, 512, 4096):
        yield _gemm(f"down-m{tokens}", Product(tokens, 4096, 14336))
        yield _gemm(f"row-fp8-m{tokens}", Product(tokens, 4096, 14336, row_fp8, operand="float8", weight_bits=8))
        yield _gemm(f"int4-m{tokens}", Product(tokens, 4096, 14336, int4, weight_bits=4.25))
    for tokens in (64, 4096):
        yield _gemm(f"gate-up-m{tokens}", Product(tokens, 28672, 4096, gate="silu"))
        yield _gemm(f"block-fp8-m{tokens}", Product(tokens, 4096, 7168, block_fp8, operand="float8", weight_bits=8))
        yield _gemm(f"w8a8-m{tokens}", Product(tokens, 4096, 14336, w8a8, operand="int8", weight_bits=8))
    for name, quant_format, bits in (
        ("q4-k", "GGUF_Q4_K", 4.5),
        ("q6-k", "GGUF_Q6_K", 6.56),
        ("q8-0", "GGUF_Q8_0", 8.5),
    ):
        yield _gemm(f"{name}-m16", Product(16, 4096, 14336, QuantScheme(QuantFormat[quant_format]), weight_bits=bits))
    yield _gemm("mxfp4-m16", Product(16, 4096, 14336, QuantScheme(QuantFormat.MXFP4, 32), weight_bits=4.25))
    yield _gemm("logits-m64", Product(64, 128256, 4096))


def _gemm(name: str, product: Product) -> Scenario:
    weight = WeightSpec(product.N, product.K, BF16, product.scheme, gated=product.gate is not None)
    spec = GemmSpec(weight, BF16, BF16, gate=product.gate)
    width = product.N // 2 if product.gate else product.N

    def call(ops: Any) -> None:
        epilogue = Epilogue(gate=product.gate) if product.gate else None
        w = ops.prepare_weight(weight)
        ops.gemm(empty(product.tokens, product.K), w, out=empty(product.tokens, width), epilogue=epilogue)

    moved = product.N * product.K * product.weight_bits / 8 + product.tokens * (product.K + width) * 2
    flops = {product.operand: 2.0 * product.tokens * product.N * product.K}
    return Scenario(name, "gemm", spec, call, Cost(moved, flops), wide_loads=True)


def _experts() -> Iterator[Scenario]:
    E, top_k = 128, 8
    mxfp4 = QuantScheme(QuantFormat.MXFP4, 32)
    for name, tokens, scheme, bits in (("decode", 16, None, 16), ("chunk", 4096, None, 16), ("mxfp4", 16, mxfp4, 4.25)):
        weight = WeightSpec(1536, 2048, BF16, scheme, gated=True)
        rows = tokens * top_k

        def call(ops: Any, weight: WeightSpec = weight, rows: int = rows) -> None:
            weights = [ops.prepare_weight(weight) for _ in range(E)]
            ops.grouped_gemm(empty(rows, 2048), weights, empty(E + 1, dtype=INT32), out=empty(rows, 768), gate="silu")

        spec = GroupedGemmSpec(weight, E, BF16, BF16, gate="silu")
        moved = min(E, rows) * 1536 * 2048 * bits / 8 + rows * (2048 + 768) * 2
        cost = Cost(moved, {"bfloat16": 2.0 * rows * 1536 * 2048})
        yield Scenario(f"qwen-moe-{name}", "grouped_gemm", spec, call, cost, wide_loads=True)


# -- rows -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowOp:
    """An op on rows: its spec, its call on so many tokens, and bytes of a row."""

    name: str
    op: str
    spec: OpSpec
    call: Callable[[int, Any], None]
    row_bytes: float
    tokens: tuple[int, ...] = (64, 4096)
    flops_per_row: dict[str, float] = field(default_factory=dict)


def _rows(fp8: torch.dtype) -> Iterator[Scenario]:
    for row in _row_ops(fp8):
        for tokens in row.tokens:
            cost = Cost(tokens * row.row_bytes, {k: v * tokens for k, v in row.flops_per_row.items()})
            call = functools.partial(row.call, tokens)
            yield Scenario(f"{row.name}-m{tokens}", row.op, row.spec, call, cost)


def _row_ops(fp8: torch.dtype) -> Iterator[RowOp]:
    M, V, E, rank = 4096, 128256, 128, 16
    fp8_format = QuantFormat.FP8_E4M3FN if fp8 is torch.float8_e4m3fn else QuantFormat.FP8_E4M3FNUZ

    def norm(tokens: int, ops: Any) -> None:
        x = empty(tokens, M)
        ops.rms_norm(x, empty(M, dtype=F32), out=empty(tokens, M), eps=1e-5, residual=empty(tokens, M))

    def gate(tokens: int, ops: Any) -> None:
        ops.act_mul(empty(tokens, 28672), out=empty(tokens, 14336), gate="silu")

    def quantize(tokens: int, ops: Any) -> None:
        scheme = QuantScheme(fp8_format, 128)
        ops.quantize(
            empty(tokens, M), scheme, out=empty(tokens, M, dtype=fp8), scales=empty(tokens, M // 128, dtype=F32)
        )

    def sample(rows: int, ops: Any) -> None:
        knobs = [empty(rows, dtype=INT64 if name == "top_k" else F32) for name in ("t", "top_k", "top_p", "min_p", "u")]
        ops.sample(empty(rows, V, dtype=F32), *knobs, out=empty(rows, dtype=INT64))

    def route(tokens: int, ops: Any) -> None:
        ops.moe_route(
            empty(tokens, E), top_k=8, out_weights=empty(tokens, 8, dtype=F32), out_ids=empty(tokens, 8, dtype=INT64)
        )

    def lora(tokens: int, ops: Any) -> None:
        a, b = [empty(rank, M) for _ in range(8)], [empty(M, rank) for _ in range(8)]
        ops.lora_gemm(empty(tokens, M), a, b, empty(8, dtype=F32), empty(tokens, dtype=INT64), out=empty(tokens, M))

    yield RowOp("norm", "rms_norm", RowSpec(M, BF16, "residual"), norm, 4 * M * 2)
    yield RowOp("silu", "act_mul", RowSpec(28672, BF16, "silu"), gate, 3 * 14336 * 2)
    yield RowOp("fp8-groups", "quantize", RowSpec(M, BF16, str(fp8_format), 128), quantize, 3 * M)
    yield RowOp("vocabulary", "sample", RowSpec(V, F32), sample, 4 * V, (64,))
    yield RowOp("experts", "moe_route", RowSpec(E, BF16, "softmax", 8), route, 2 * E + 96)
    spec = LoraSpec(M, M, rank, BF16)
    yield RowOp("adapters", "lora_gemm", spec, lora, 3 * M * 2, (64,), {"bfloat16": 4.0 * M * rank})
