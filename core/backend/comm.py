"""The collective operations of a group of ranks. The backend makes the communicator; layers only see this.

All ranks make the same calls in the same order, with tensors of the same shapes and dtypes. The last axis of a tensor
has stride 1, leading axes may have any stride. A call that can't end because another rank is gone raises RankLost.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """Stream-ordered collectives over one group of ranks.

    Attributes:
        rank, world_size: this process's place in the group.
        capturable: whether calls may be recorded into a Program.
    """

    rank: int
    world_size: int
    capturable: bool

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        """out = sum of x over the ranks, the same bits on each; out may be x."""

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [world_size, *x.shape] = every rank's x."""

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        """out = this rank's slice of the sum of x [world_size, *out.shape]."""

    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        """Overwrite x with root's x."""

    def barrier(self) -> None:
        """Return, on the host, when every rank has arrived."""

    def close(self) -> None:
        """Leave the group. Idempotent."""


class SingleRank:
    """The group of one: every collective is a copy or nothing at all."""

    rank = 0
    world_size = 1
    capturable = True

    def all_reduce(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        if out is not x:  # addresses tell nothing on a device whose tensors have none on the host
            out.copy_(x)

    def all_gather(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        out[0].copy_(x)

    def reduce_scatter(self, x: torch.Tensor, *, out: torch.Tensor) -> None:
        out.copy_(x[0])

    def broadcast(self, x: torch.Tensor, *, root: int) -> None:
        if root != 0:
            raise ValueError(f"root is {root}; a group of one has only rank 0")

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return
