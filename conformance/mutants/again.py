"""Faults of a second use: what a call leaves behind in a weight or in a plan; and one that writes beside the cache."""

from __future__ import annotations

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, around
from octavo.conformance.mutants.paged import SPLIT_KEYS, change_meta, seq_lens, views
from octavo.core.backend import StepPlan


@after
def weight_lost(call: Call) -> None:
    """The product's workspace lies over the packed weight."""
    call["w"].data_NK.zero_()


def spent_plans(honest: Op) -> Op:
    """From its second call on the semaphore says that all splits are there before the last one is."""
    used: list[StepPlan] = []  # The last one, kept alive: another plan must not get its identity.

    @around
    def attend(op: Op, call: Call) -> None:
        plan = call["plan"]
        if used and used[0] is plan:
            lengths = seq_lens(plan.meta)
            change_meta(call, seq_lens=torch.where(lengths > SPLIT_KEYS, lengths - SPLIT_KEYS, lengths))
        used[:] = [plan]
        op(**call)

    return attend(honest)


@after
def whole_vectors_of_a_block(call: Call) -> None:
    """A written block's end is rounded up to whole vectors; where blocks lie apart that is nobody's memory."""
    kv = call["kv"]
    _, value = views(kv)
    elements = kv.spec.block_bytes // kv.spec.dtype.itemsize
    if value.stride(0) < elements + 4:
        return
    slots = call["slot_mapping_T"]
    for block in (slots[slots >= 0] // kv.spec.block_size).unique().tolist():
        end = views(kv)[0].storage_offset() + block * value.stride(0) + elements
        value.as_strided((4,), (1,), end).zero_()


MUTANTS = (
    Mutant(
        "weight-lost-after-one-product",
        "a product leaves its packed weight zeroed: the next one with it is wrong",
        "GEMM kernels that take scratch memory behind a weight, weights repacked in place on first use",
        "gemm",
        weight_lost,
    ),
    Mutant(
        "plan-spent-after-one-layer",
        f"the second layer that is given a plan leaves the last {SPLIT_KEYS} keys of long contexts out",
        "split-KV kernels whose semaphores are reset by the plan and not by the kernel",
        "paged_attention",
        spent_plans,
    ),
    Mutant(
        "kv-pad-written",
        "where blocks lie apart, what follows a block that a token was written to is zeroed",
        "cache kernels that store whole vectors without a mask",
        ("write_kv", "rope_write_kv"),
        whole_vectors_of_a_block,
    ),
)
