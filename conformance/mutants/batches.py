"""Faults of batch invariance: with many rows another kernel runs, which is as right, and rounds otherwise.

rows < MANY   the reference, one row at a time      ┐ the same row has other bits in a large batch
rows ≥ MANY   an honest variant (../variants)       ┘
"""

from __future__ import annotations

import functools

from octavo.conformance.mutants.base import Call, Mutant, Op, Wrap, around
from octavo.conformance.mutants.row_by_row import row_by_row
from octavo.conformance.variants import attention, moe, product

MANY = 64
ROWS_OF = ("x_TK", "logits_TE", "q_THD", "q_latent_THC")
"""What has a row per token, by op."""

HALVES = functools.partial(product.split, parts=2)
SPLIT = attention.Scheme(splits=2, block=16)


def for_many(otherwise: Op) -> Wrap:
    """`otherwise` in place of the honest op where a call has MANY rows."""

    @around
    def fault(honest: Op, call: Call) -> None:
        (rows,) = (call[name].shape[0] for name in ROWS_OF if name in call)
        (otherwise if rows >= MANY else honest)(**call)

    return fault


def _mutant(name: str, fault: str, source: str, op: str, otherwise: Op) -> Mutant:
    return Mutant(
        name, fault, source, op, for_many(otherwise), backend={"batch_invariant": True}, honest_ops=row_by_row
    )


MUTANTS = (
    _mutant(
        "gemm-split-k-by-batch",
        "with 64 rows K is split in two, so that a row's bits depend on the batch",
        "products whose shape is chosen by the number of rows",
        "gemm",
        product.gemm_with(HALVES),
    ),
    _mutant(
        "grouped-gemm-split-k-by-batch",
        "with 64 rows K is split in two, so that a row's bits depend on the batch",
        "products of experts whose shape is chosen by the number of rows",
        "grouped_gemm",
        product.grouped_gemm_with(HALVES),
    ),
    _mutant(
        "lora-split-k-by-batch",
        "with 64 rows K is split in four, so that a row's bits depend on the batch",
        "adapter kernels with one form for prompts and one for decode",
        "lora_gemm",
        moe.lora_gemm_with(moe.split_k),
    ),
    _mutant(
        "moe-route-other-sum-by-batch",
        "with 64 rows the softmax's sum is taken in another order, so that a row's weights depend on the batch",
        "routing kernels that give a row a warp or a whole block, as rows come",
        "moe_route",
        moe.route_one_by_one,
    ),
    _mutant(
        "attention-splits-by-batch",
        "with 64 rows the keys are split in two, so that a row's bits depend on the batch",
        "kernels whose number of splits fills the device, whatever the batch",
        "paged_attention",
        attention.paged_attention_with(SPLIT),
    ),
    _mutant(
        "mla-splits-by-batch",
        "with 64 rows the keys are split in two, so that a row's bits depend on the batch",
        "MLA kernels whose number of splits fills the device, whatever the batch",
        "mla_attention",
        attention.mla_attention_with(SPLIT),
    ),
)
