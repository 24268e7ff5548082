"""Faults of collectives, alone and fused with a norm.

of the fused op    a Mutant wraps the op, as everywhere else
of the group       a Communicator between the ops and the honest one, on each rank: GroupHost(kind) makes them
"""

from __future__ import annotations

import itertools
from collections import deque
from functools import partial
from typing import Any

import torch

from octavo.conformance.harness.host import HostBackend
from octavo.conformance.mutants.base import Call, Mutant, Op, before
from octavo.core.backend import Communicator

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


class Faulty:
    """A communicator that is honest but for what a subclass changes. A group of one never shows it."""

    def __init__(self, honest: Communicator) -> None:
        self.honest = honest
        self.rank = honest.rank
        self.world_size = honest.world_size
        self.capturable = honest.capturable

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.honest.all_reduce(x, out=out)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.honest.all_gather(x, out=out)

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.honest.reduce_scatter(x, out=out)

    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        self.honest.broadcast(x, root=root)

    def barrier(self) -> None:
        self.honest.barrier()

    def close(self) -> None:
        self.honest.close()


class LastRankDropped(Faulty):
    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        is_lost = x.nbytes > ONE_SHOT_BYTES and self.rank == self.world_size - 1
        self.honest.all_reduce(torch.zeros_like(x) if is_lost else x, out=out)


class Stale(Faulty):
    def __init__(self, honest: Communicator) -> None:
        super().__init__(honest)
        self._calls = itertools.count(1)
        self._sent = deque[torch.Tensor](maxlen=2)

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self._sent.append(x.clone())
        is_stale = next(self._calls) > CALLS and self._sent[0].shape == x.shape and self.rank == 1
        self.honest.all_reduce(self._sent[0] if is_stale else x, out=out)


class Overwriting(Faulty):
    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        if self.rank == 0:
            out[..., -1] = 0
        self.honest.all_reduce(x, out=out)


class OwnFirst(Faulty):
    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        parts = torch.empty((self.world_size, *x.shape), dtype=x.dtype)
        self.honest.all_gather(x, out=parts)
        total = torch.zeros(x.shape)
        for step in range(self.world_size):
            total += parts[(self.rank + step) % self.world_size]
        out.copy_(total)


class OutOfOrder(Faulty):
    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.honest.all_gather(x, out=out)
        out.copy_(out.roll(-self.rank, 0))


class WrongSlice(Faulty):
    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        self.honest.reduce_scatter(x.roll(1, 0), out=out)


class RootIgnored(Faulty):
    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        self.honest.broadcast(x, root=0)


class NoBarrier(Faulty):
    def barrier(self) -> None:
        return


class GroupHost(HostBackend):
    """A host whose groups are faulty."""

    def __init__(self, kind: type[Faulty], ops: object | None = None, **rest: Any) -> None:
        super().__init__(ops, **rest)
        self._kind = kind

    def communicator(self, rank: int, world_size: int, address: str) -> Communicator:
        honest = super().communicator(rank, world_size, address)
        return honest if world_size == 1 else self._kind(honest)


def of_a_group(name: str, kind: type[Faulty], fault: str, source: str) -> Mutant:
    return Mutant(name, fault, source, "all_reduce_norm", lambda honest: honest, host=partial(GroupHost, kind))


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
    of_a_group(
        "all-reduce-last-rank-above-size",
        LastRankDropped,
        "in messages above 32 KiB the last rank's part is missing from the sum",
        "collectives that split large messages among the ranks",
    ),
    of_a_group(
        "all-reduce-stale-after-many-calls",
        Stale,
        "after 64 calls rank 1's part of the sum is that of the call before",
        "collectives over shared buffers whose flags count in few bits",
    ),
    of_a_group(
        "all-reduce-in-place-overwrites",
        Overwriting,
        "the output is cleared before the message that lies in it has been sent",
        "collectives that prepare their output while peers still read it",
    ),
    of_a_group(
        "all-reduce-own-first",
        OwnFirst,
        "each rank adds its own part first, so that sums differ in their last bits from rank to rank",
        "one-shot sums that begin with what is at hand",
    ),
    of_a_group(
        "all-gather-out-of-order",
        OutOfOrder,
        "the parts begin with the rank's own instead of rank 0's",
        "rings that store parts as they arrive",
    ),
    of_a_group(
        "reduce-scatter-wrong-slice",
        WrongSlice,
        "each rank is given its neighbour's slice of the sum",
        "rings that stop one step early",
    ),
    of_a_group(
        "broadcast-ignores-root",
        RootIgnored,
        "rank 0's tensor is sent, whoever the root is",
        "roots numbered within another group",
    ),
    of_a_group(
        "barrier-does-not-wait",
        NoBarrier,
        "a barrier returns at once",
        "barriers that only queue their work",
    ),
)
