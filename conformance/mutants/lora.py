"""Faults of low-rank adapters."""

from __future__ import annotations

import itertools

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, after, before, nudge

SPLIT_K = 32


@before
def rank_32(call: Call) -> None:
    """Of a rank of 32 the first 16 are summed."""
    if call["a_LRK"].shape[1] == 32:
        call["a_LRK"], call["b_LNR"] = call["a_LRK"][:, :16], call["b_LNR"][..., :16]


def atomics(honest: Op) -> Op:
    """Parts of K are added by atomics: the order, and with it the rounding, is another one each time."""
    calls = itertools.count()

    @after
    def add(call: Call) -> None:
        if call["x_TK"].shape[1] > SPLIT_K:
            nudge(call["out"], next(calls))

    return add(honest)


@before
def last_adapter(call: Call) -> None:
    """-1 counts from the end."""
    adapter_T = call["adapter_T"]
    call["adapter_T"] = torch.where(adapter_T < 0, len(call["a_LRK"]) - 1, adapter_T)


MUTANTS = (
    Mutant(
        "lora-rank-32",
        "rank 32: the second half of the rank is left out",
        "adapter kernels with a fixed tile of ranks",
        "lora_gemm",
        rank_32,
    ),
    Mutant(
        "lora-atomics",
        "parts of K are added by atomics, so that two runs differ in the last bits",
        "adapter kernels that split K",
        "lora_gemm",
        atomics,
    ),
    Mutant(
        "lora-row-without-adapter",
        "a row without an adapter gets the last one",
        "tensor libraries in which negative indices count from the end",
        "lora_gemm",
        last_adapter,
    ),
)
