"""Faults of collectives fused with a norm."""

from __future__ import annotations

import itertools
from collections import deque

import torch

from octavo.conformance.mutants.base import Call, Mutant, Op, before

ONE_SHOT_BYTES = 32 * 1024
CALLS = 64


@before
def above_a_size(call: Call) -> None:
    """Above a size the message is split in two, and the second part is lost."""
    x = call["x_TM"]
    if x.nbytes > ONE_SHOT_BYTES:
        call["x_TM"] = x.clone()
        call["x_TM"][x.shape[0] // 2 :] = 0


def after_many_calls(honest: Op) -> Op:
    """A counter of the barrier wraps: from then on a call may read what its peers wrote one call earlier."""
    calls, sent = itertools.count(1), deque[torch.Tensor](maxlen=2)

    @before
    def read(call: Call) -> None:
        sent.append(call["x_TM"].clone())
        if next(calls) > CALLS and sent[0].shape == sent[-1].shape:
            call["x_TM"] = sent[0].to(sent[-1].dtype)

    return read(honest)


MUTANTS = (
    Mutant(
        "all-reduce-norm-above-size",
        "messages above 32 KiB lose their second half",
        "fused collectives that change their algorithm with the size",
        "all_reduce_norm",
        above_a_size,
    ),
    Mutant(
        "all-reduce-norm-after-many-calls",
        "after 64 calls a call reads what the one before it sent",
        "fused collectives whose barrier counts in few bits",
        "all_reduce_norm",
        after_many_calls,
    ),
)
