"""Products that add up in other orders and precisions.

Multiply: x [T, K], w [N, K] in fp32 ──► [T, N] in fp32       all that a variant brings; the rest is the reference's
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from octavo.conformance.variants.base import Op, Variant
from octavo.conformance.variants.quantised import quantised_cases
from octavo.core.backend import Epilogue, Gate, NormPrologue, PackedWeight
from octavo.core.backend.reference.product import finish
from octavo.core.backend.reference.quantize import fake_quantized
from octavo.core.backend.reference.rows import normalized

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

BLOCK_K = 64
TRUNCATED_K = 8
"""Products that are added exactly before the accumulator drops bits, as tensor cores do."""


def gemm_with(multiply: Multiply) -> Op:
    """The contract's gemm around another product."""

    def gemm(
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        prologue: NormPrologue | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        x_TK = x_TK.float() if prologue is None else normalized(x_TK, prologue.weight_K, prologue.eps)
        finish(_product(multiply, x_TK, w), epilogue or Epilogue(), out)

    return gemm


def grouped_gemm_with(multiply: Multiply) -> Op:
    """The contract's grouped_gemm around another product."""

    def grouped_gemm(
        x_TK: torch.Tensor,
        weights: list[PackedWeight],
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        gate: Gate | None = None,
    ) -> None:
        bounds = segment_start.tolist()
        for expert, weight in enumerate(weights):
            rows = slice(bounds[expert], bounds[expert + 1])
            if rows.start < rows.stop:
                finish(_product(multiply, x_TK[rows].float(), weight), Epilogue(gate=gate), out[rows])

    return grouped_gemm


def _product(multiply: Multiply, x_TK: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    scheme = None if w.spec.scheme is None else w.spec.scheme.for_activations()
    if scheme is not None:
        x_TK = fake_quantized(x_TK, scheme)
    return multiply(x_TK, w.dense())


def _blocks(columns: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, columns)) for start in range(0, columns, block))


def in_blocks(x_TK: torch.Tensor, w_NK: torch.Tensor, *, backwards: bool = False) -> torch.Tensor:
    """A partial sum per block of K, added one after the other."""
    total = torch.zeros(x_TK.shape[0], w_NK.shape[0])
    blocks = list(_blocks(x_TK.shape[1], BLOCK_K))
    for block in reversed(blocks) if backwards else blocks:
        total += x_TK[:, block] @ w_NK[:, block].T
    return total


def split(x_TK: torch.Tensor, w_NK: torch.Tensor, *, parts: int) -> torch.Tensor:
    """Interleaved K, each part summed alone, then the parts as a tree."""
    sums = [x_TK[:, part::parts] @ w_NK[:, part::parts].T for part in range(parts)]
    while len(sums) > 1:
        sums = [sum(sums[i + 1 : i + 2], sums[i]) for i in range(0, len(sums), 2)]
    return sums[0]


def one_by_one(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """A fused multiply-add per column, in order: the longest chain of roundings there is."""
    total = torch.zeros(x_TK.shape[0], w_NK.shape[0])
    for k in range(x_TK.shape[1]):
        total.addr_(x_TK[:, k], w_NK[:, k])
    return total


def wide(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """Better than declared: float64, rounded once."""
    return (x_TK.double() @ w_NK.double().T).float()


def tf32(x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor:
    """Operands rounded to 11 significant bits, to nearest even."""
    return _to_tf32(x_TK) @ _to_tf32(w_NK).T


def truncating(x_TK: torch.Tensor, w_NK: torch.Tensor, *, bits: int) -> torch.Tensor:
    """A few products at a time, then the accumulator drops what lies below `bits` significant bits."""
    total = torch.zeros(x_TK.shape[0], w_NK.shape[0], dtype=torch.float64)
    x, w = x_TK.double(), w_NK.double()
    for block in _blocks(x.shape[1], TRUNCATED_K):
        total = _truncated(total + x[:, block] @ w[:, block].T, bits)
    return total.float()


def _truncated(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float64 cut to `bits` significant bits, toward zero."""
    return (x.contiguous().view(torch.int64) & -(1 << (53 - bits))).view(torch.float64)


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    raw = x.contiguous().view(torch.int32)
    dropped = 24 - 11
    half_minus_one_and_odd = (1 << (dropped - 1)) - 1 + ((raw >> dropped) & 1)
    return ((raw + half_minus_one_and_odd) & -(1 << dropped)).view(torch.float32)


def _variant(name: str, what: str, multiply: Multiply, accumulation: str = "") -> Variant:
    ops = {"gemm": gemm_with(multiply), "grouped_gemm": grouped_gemm_with(multiply)}
    declares: dict[str, Any] = dict.fromkeys(ops, accumulation) if accumulation else {}
    return Variant(f"gemm-{name}", what, tuple(ops), ops, declares, cases=quantised_cases)


VARIANTS = (
    _variant("blocks", "sums in blocks of K", in_blocks),
    _variant("backwards", "sums in blocks of K, the last one first", functools.partial(in_blocks, backwards=True)),
    _variant("split-2", "K split in two", functools.partial(split, parts=2)),
    _variant("split-7", "K split in seven", functools.partial(split, parts=7)),
    _variant("chain", "one product after the other", one_by_one),
    _variant("wide", "float64 inside", wide),
    _variant("tf32", "operands rounded to tf32, declared", tf32, "tf32"),
    _variant(
        "truncating",
        "an fp32 accumulator that truncates, declared",
        functools.partial(truncating, bits=24),
        "fp32-trunc",
    ),
    _variant(
        "fp22", "an accumulator of 13 bits that truncates, declared", functools.partial(truncating, bits=14), "fp22"
    ),
)
