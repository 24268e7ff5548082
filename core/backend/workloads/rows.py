"""Ops on rows: norms, activations, quantiser, sampling, the way to experts and back, adapters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from octavo.core.backend.quant import QuantScheme
from octavo.core.backend.specs import LoraSpec, RowSpec
from octavo.core.backend.workloads.base import F32, INT32, INT64, Cost, Prepared, Tensors, Workload, fp8_format, operand

HIDDEN, INTERMEDIATE, VOCABULARY, EXPERTS, TOP_K = 4096, 14336, 128256, 128, 8


def list_workloads(dtype: torch.dtype, fp8: torch.dtype | None) -> Iterator[Workload]:
    for tokens in (64, 4096):
        yield _norm(dtype, tokens)
        yield _layer_norm(dtype, tokens)
        yield _gate(dtype, tokens)
        yield _activation(dtype, tokens)
        yield _route(tokens)
        yield _permute(tokens)
        yield _combine(dtype, tokens)
        if fp8 is not None:
            yield _quantize(dtype, tokens, fp8)
    yield _sample(64)
    yield _adapters(dtype, 64)


def _norm(dtype: torch.dtype, tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.rms_norm,
            tensors.normal(tokens, HIDDEN),
            tensors.normal(HIDDEN, dtype=F32),
            out=tensors.empty(tokens, HIDDEN),
            eps=1e-5,
            residual=tensors.normal(tokens, HIDDEN),
        )

    spec = RowSpec(HIDDEN, dtype, "residual")
    return Workload(f"norm-m{tokens}", "rms_norm", spec, prepare, Cost(tokens * 4 * HIDDEN * dtype.itemsize))


def _layer_norm(dtype: torch.dtype, tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.layer_norm,
            tensors.normal(tokens, HIDDEN),
            tensors.normal(HIDDEN, dtype=F32),
            out=tensors.empty(tokens, HIDDEN),
            eps=1e-5,
            bias_M=tensors.normal(HIDDEN, dtype=F32),
            residual=tensors.normal(tokens, HIDDEN),
        )

    spec = RowSpec(HIDDEN, dtype, "residual")
    return Workload(f"norm-m{tokens}", "layer_norm", spec, prepare, Cost(tokens * 4 * HIDDEN * dtype.itemsize))


def _gate(dtype: torch.dtype, tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        pair = tensors.normal(tokens, 2 * INTERMEDIATE)
        return functools.partial(ops.act_mul, pair, out=tensors.empty(tokens, INTERMEDIATE), gate="silu")

    spec = RowSpec(2 * INTERMEDIATE, dtype, "silu")
    return Workload(f"silu-m{tokens}", "act_mul", spec, prepare, Cost(tokens * 3 * INTERMEDIATE * dtype.itemsize))


def _activation(dtype: torch.dtype, tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        x = tensors.normal(tokens, INTERMEDIATE)
        return functools.partial(ops.activation, x, out=tensors.empty(tokens, INTERMEDIATE), kind="gelu_tanh")

    spec = RowSpec(INTERMEDIATE, dtype, "gelu_tanh")
    return Workload(f"gelu-m{tokens}", "activation", spec, prepare, Cost(tokens * 2 * INTERMEDIATE * dtype.itemsize))


def _quantize(dtype: torch.dtype, tokens: int, fp8: torch.dtype) -> Workload:
    scheme = QuantScheme(fp8_format(fp8), 128)

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.quantize,
            tensors.normal(tokens, HIDDEN),
            scheme,
            out=tensors.empty(tokens, HIDDEN, dtype=fp8),
            scales=tensors.empty(tokens, HIDDEN // 128, dtype=F32),
        )

    spec = RowSpec(HIDDEN, dtype, str(scheme.format), 128)
    return Workload(f"fp8-groups-m{tokens}", "quantize", spec, prepare, Cost(tokens * HIDDEN * (dtype.itemsize + 1)))


def _route(tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.moe_route,
            tensors.normal(tokens, EXPERTS, dtype=F32),
            top_k=TOP_K,
            out_weights=tensors.empty(tokens, TOP_K, dtype=F32),
            out_ids=tensors.empty(tokens, TOP_K, dtype=INT64),
        )

    spec = RowSpec(EXPERTS, F32, "softmax", TOP_K)
    return Workload(f"experts-m{tokens}", "moe_route", spec, prepare, Cost(tokens * (4 * EXPERTS + 12 * TOP_K)))


def _chosen(tokens: int) -> torch.Tensor:
    """[T, TOP_K] int64: experts of each token, all of them used alike."""
    return (torch.arange(tokens * TOP_K) * 17 % EXPERTS).view(tokens, TOP_K)


def _permute(tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.moe_permute,
            tensors.of(_chosen(tokens)),
            first_expert=0,
            out_rows=tensors.empty(tokens * TOP_K, dtype=INT64),
            out_places=tensors.empty(tokens, TOP_K, dtype=INT64),
            segment_start=tensors.empty(EXPERTS + 1, dtype=INT32),
        )

    spec = RowSpec(EXPERTS, INT64, extent=TOP_K)
    return Workload(f"experts-m{tokens}", "moe_permute", spec, prepare, Cost(tokens * TOP_K * 24))


def _combine(dtype: torch.dtype, tokens: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        pairs = tokens * TOP_K
        return functools.partial(
            ops.moe_combine,
            tensors.normal(pairs, HIDDEN),
            tensors.of(_chosen(tokens).flatten().argsort(stable=True).argsort().view(tokens, TOP_K)),
            tensors.normal(tokens, TOP_K, dtype=F32),
            out=tensors.empty(tokens, HIDDEN),
            residual=tensors.normal(tokens, HIDDEN),
        )

    spec = RowSpec(HIDDEN, dtype, "residual", TOP_K)
    cost = Cost(tokens * ((TOP_K + 2) * HIDDEN * dtype.itemsize + 12 * TOP_K))
    return Workload(f"experts-m{tokens}", "moe_combine", spec, prepare, cost)


def _sample(rows: int) -> Workload:
    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.sample,
            tensors.normal(rows, VOCABULARY, dtype=F32),
            tensors.of(torch.full((rows,), 0.8)),
            tensors.of(torch.full((rows,), 50)),
            tensors.of(torch.full((rows,), 0.95)),
            tensors.of(torch.zeros(rows)),
            tensors.of(torch.linspace(0, 0.99, rows)),
            out=tensors.empty(rows, dtype=INT64),
        )

    return Workload(f"vocabulary-m{rows}", "sample", RowSpec(VOCABULARY, F32), prepare, Cost(rows * VOCABULARY * 4))


def _adapters(dtype: torch.dtype, tokens: int) -> Workload:
    rank, adapters = 16, 8

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.lora_gemm,
            tensors.normal(tokens, HIDDEN),
            tensors.normal(adapters, rank, HIDDEN),
            tensors.normal(adapters, HIDDEN, rank),
            tensors.of(torch.ones(adapters)),
            tensors.of((torch.arange(tokens) % adapters).to(torch.int32)),
            out=tensors.normal(tokens, HIDDEN),
        )

    moved = (tokens * 3 + adapters * 2 * rank) * HIDDEN * dtype.itemsize
    cost = Cost(moved, {operand(dtype): 4.0 * tokens * HIDDEN * rank})
    return Workload(f"adapters-m{tokens}", "lora_gemm", LoraSpec(HIDDEN, HIDDEN, rank, dtype), prepare, cost)
