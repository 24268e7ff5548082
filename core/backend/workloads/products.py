"""Products with plain and quantised weights, and with a mixture's experts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend.ops import Epilogue
from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.backend.specs import Gate, GemmSpec, GroupedGemmSpec, WeightSpec
from octavo.core.backend.workloads.base import INT32, Cost, Prepared, Tensors, Workload, fp8_format, operand

MXFP4 = QuantScheme(QuantFormat.MXFP4, 32)
INT4 = QuantScheme(QuantFormat.INT4, 128, symmetric=False)
W8A8 = QuantScheme(QuantFormat.INT8, activation=QuantFormat.INT8)


@dataclass(frozen=True, slots=True)
class Product:
    """out [tokens, N] = x [tokens, K] @ w.T.

    Attributes:
        operand: what the device multiplies; None: the activations as they are.
        weight_bits: of one element, scales included; None: of a plain one.
    """

    tokens: int
    N: int
    K: int
    scheme: QuantScheme | None = None
    gate: Gate | None = None
    operand: str | None = None
    weight_bits: float | None = None


def list_workloads(dtype: torch.dtype, fp8: torch.dtype | None) -> Iterator[Workload]:
    for tokens in (1, 16, 64, 512, 4096):
        yield _gemm(f"down-m{tokens}", dtype, Product(tokens, 4096, 14336))
        yield _gemm(f"int4-m{tokens}", dtype, Product(tokens, 4096, 14336, INT4, weight_bits=4.25))
    for tokens in (64, 4096):
        yield _gemm(f"gate-up-m{tokens}", dtype, Product(tokens, 28672, 4096, gate="silu"))
        yield _gemm(f"w8a8-m{tokens}", dtype, Product(tokens, 4096, 14336, W8A8, operand="int8", weight_bits=8))
    if fp8 is not None:
        yield from _fp8(dtype, fp8_format(fp8))
    for name, bits in (("Q4_K", 4.5), ("Q6_K", 6.5625), ("Q8_0", 8.5)):
        scheme = QuantScheme(QuantFormat[f"GGUF_{name}"])
        yield _gemm(f"{name.lower().replace('_', '-')}-m16", dtype, Product(16, 4096, 14336, scheme, weight_bits=bits))
    yield _gemm("mxfp4-m16", dtype, Product(16, 4096, 14336, MXFP4, weight_bits=4.25))
    yield _gemm("logits-m64", dtype, Product(64, 128256, 4096))
    yield _experts("qwen-moe-m16", dtype, 16)
    yield _experts("qwen-moe-m4096", dtype, 4096)
    yield _experts("qwen-moe-mxfp4-m16", dtype, 16, MXFP4, 4.25)


def _fp8(dtype: torch.dtype, quant_format: QuantFormat) -> Iterator[Workload]:
    rows = QuantScheme(quant_format, activation=quant_format)
    blocks = QuantScheme(quant_format, 128, block_rows=128, activation=quant_format, activation_group_size=128)
    for tokens in (1, 16, 64, 512, 4096):
        yield _gemm(f"fp8-m{tokens}", dtype, Product(tokens, 4096, 14336, rows, operand="float8", weight_bits=8))
    for tokens in (64, 4096):
        yield _gemm(
            f"fp8-blocks-m{tokens}", dtype, Product(tokens, 4096, 7168, blocks, operand="float8", weight_bits=8)
        )


def _gemm(name: str, dtype: torch.dtype, product: Product) -> Workload:
    weight = WeightSpec(product.N, product.K, dtype, product.scheme, gated=product.gate is not None)
    spec = GemmSpec(weight, dtype, dtype, gate=product.gate)
    width = product.N // 2 if product.gate else product.N

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        return functools.partial(
            ops.gemm,
            tensors.normal(product.tokens, product.K),
            tensors.weight(ops, weight),
            out=tensors.empty(product.tokens, width),
            epilogue=Epilogue(gate=product.gate) if product.gate else None,
        )

    weight_bits = product.weight_bits or 8 * dtype.itemsize
    moved = product.N * product.K * weight_bits / 8 + product.tokens * (product.K + width) * dtype.itemsize
    cost = Cost(moved, {product.operand or operand(dtype): 2.0 * product.tokens * product.N * product.K})
    return Workload(name, "gemm", spec, prepare, cost, wide_loads=True, from_memory=True)


def _experts(
    name: str,
    dtype: torch.dtype,
    tokens: int,
    scheme: QuantScheme | None = None,
    weight_bits: float | None = None,
) -> Workload:
    E, top_k, N, K = 128, 8, 1536, 2048
    weight = WeightSpec(N, K, dtype, scheme, gated=True)
    spec = GroupedGemmSpec(weight, E, dtype, dtype, gate="silu")
    rows = tokens * top_k

    def prepare(ops: Any, tensors: Tensors) -> Prepared:
        starts = torch.arange(E + 1, dtype=INT32) * rows // E  # an even load; with fewer rows some experts get none
        return functools.partial(
            ops.grouped_gemm,
            tensors.normal(rows, K),
            [tensors.weight(ops, weight) for _ in range(E)],
            tensors.of(starts.to(INT32)),
            out=tensors.empty(rows, N // 2),
            gate="silu",
        )

    weight_bytes = N * K * (weight_bits or 8 * dtype.itemsize) / 8
    moved = min(E, rows) * weight_bytes + rows * (K + N // 2) * dtype.itemsize
    cost = Cost(moved, {operand(dtype): 2.0 * rows * N * K})
    return Workload(name, "grouped_gemm", spec, prepare, cost, wide_loads=True, from_memory=True)
