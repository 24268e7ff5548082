"""The reference ops one row at a time: bits that depend on no other row, whatever torch's products do with many.

    call of T rows ──► T calls of the reference, each on a copy of its row ──► out

What mutants of batch invariance are made of: on the plain reference, whose products split rows as their library likes,
a case that fails would show the library and not the mutant.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.conformance.mutants.base import Call, Op, around, reference_ops
from octavo.core.backend import AttentionMetadata, ReferenceOps, StepPlan
from octavo.core.backend.reference.attention import spans

QUERIES = ("q_THD", "q_latent_THC", "q_rope_THR")


def row_by_row() -> ReferenceOps:
    """The reference, with those ops that mutants of this kind break taken apart."""
    ops = reference_ops()
    wraps = {
        "gemm": product_rows,
        "grouped_gemm": expert_rows,
        "lora_gemm": adapter_rows,
        "moe_route": routed_rows,
        "paged_attention": query_rows,
        "mla_attention": query_rows,
    }
    for name, wrap in wraps.items():
        setattr(ops, name, wrap(getattr(ops, name)))
    return ops


@around
def product_rows(honest: Op, call: Call) -> None:
    """Products with nothing but a gate behind them, as the cases of batch invariance have them."""
    for row in _rows(call["x_TK"]):
        honest(**call | {"x_TK": call["x_TK"][row].clone(), "out": call["out"][row]})


@around
def expert_rows(honest: Op, call: Call) -> None:
    for row in _rows(call["x_TK"]):
        segments = call["segment_start"].clamp(row.start, row.stop) - row.start
        honest(**call | {"x_TK": call["x_TK"][row].clone(), "segment_start": segments, "out": call["out"][row]})


@around
def adapter_rows(honest: Op, call: Call) -> None:
    for row in _rows(call["x_TK"]):
        own = {name: call[name][row] for name in ("adapter_T", "out")}
        honest(**call | own | {"x_TK": call["x_TK"][row].clone()})


@around
def routed_rows(honest: Op, call: Call) -> None:
    for row in _rows(call["logits_TE"]):
        own = {name: call[name][row] for name in ("out_weights", "out_ids")}
        honest(**call | own | {"logits_TE": call["logits_TE"][row].clone()})


@around
def query_rows(honest: Op, call: Call) -> None:
    """A batch of one request of one row each, which sees the keys up to its own."""
    meta: AttentionMetadata = call["plan"].meta
    for request, start, end, length in spans(meta):
        for t in range(start, end):
            row = slice(t, t + 1)
            own = {name: call[name][row].clone() for name in QUERIES if name in call}
            own |= {name: call[name][row] for name in ("out", "lse") if call[name] is not None}
            honest(**call | own | {"plan": StepPlan(_of_one(meta, request, max(length - (end - 1 - t), 0)))})


def _of_one(meta: AttentionMetadata, request: int, keys: int) -> AttentionMetadata:
    return replace(
        meta,
        num_requests=1,
        num_tokens=1,
        max_query_len=1,
        max_seq_len=keys,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([keys], dtype=torch.int32),
        block_table=meta.block_table[request : request + 1],
    )


def _rows(x: torch.Tensor) -> list[slice]:
    return [slice(t, t + 1) for t in range(x.shape[0])]
