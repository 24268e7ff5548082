"""A group of ranks that are threads of one process: collectives without a transport, in the order of the ranks.

A rank that fails breaks the group, so that the others raise BrokenBarrierError in place of waiting for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class ThreadGroup:
    """`size` ranks.

    Attributes:
        comms: a Communicator for each.
        calls: how many collectives rank 0 has made.
    """

    def __init__(self, size: int) -> None:
        self.calls = 0
        self._barrier = threading.Barrier(size)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * size
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rank")
        self.comms = [_Member(self, rank, size) for rank in range(size)]

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """`work(rank)` on every rank at once. Raises what the first rank that failed by itself raised."""

        def guarded(rank: int) -> Result:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        futures = [self._threads.submit(guarded, rank) for rank in range(len(self.comms))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        self._barrier.reset()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's x."""
        self.calls += rank == 0
        self._slots[rank] = x.clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class _Member:
    """One rank's Communicator."""

    capturable = False

    def __init__(self, group: ThreadGroup, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        first, *others = self._group.exchange(self.rank, x)
        total = first.clone()
        for other in others:
            total.add_(other)
        out.copy_(total)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(torch.stack(self._group.exchange(self.rank, x)))

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(sum(part[self.rank] for part in self._group.exchange(self.rank, x)))

    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        x.copy_(self._group.exchange(self.rank, x)[root])

    def barrier(self) -> None:
        self._group.exchange(self.rank, torch.empty(0))

    def close(self) -> None:
        return
