"""A rank's place in the group over which one model is split, as layers see it.

             checkpoint [N, K]        rows split: [N / size, K]        columns split: [N, K / size]
             ┌──────────────┐         ┌──────────────┐ rank 0          ┌──────┬───────┐
             │              │         ├──────────────┤                 │ rank │ rank  │
             │              │         │ rank 1's     │                 │  0   │   1   │
             └──────────────┘         └──────────────┘                 └──────┴───────┘
                                      each rank has its outputs        each has a summand: all_reduce

A layer asks which part it holds when it is built, and cuts a checkpoint tensor to it when the tensor is placed; the
checkpoint is never resharded on disk. The communicator is the backend's; in a step layers call it, and nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from octavo.core.backend.comm import Communicator, SingleRank
from octavo.core.parallel.mesh import Range, even_range, kv_head_range, padded_range


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a group.

    Attributes:
        rank, size: the place in the group; 0 of 1 where a model is whole.
        comm: collectives over the group, in the order in which all ranks call them.
    """

    rank: int
    size: int
    comm: Communicator

    @classmethod
    def single(cls) -> Self:
        """The only rank: it holds everything, and its collectives cost nothing."""
        return cls(0, 1, SingleRank())

    @classmethod
    def of(cls, comm: Communicator) -> Self:
        """The place that a communicator's rank has."""
        return cls(comm.rank, comm.world_size, comm)

    @classmethod
    def planned(cls, size: int) -> Self:
        """The first of `size` ranks, for its arithmetic alone: it has no group."""
        return cls(0, size, SingleRank())

    @property
    def is_whole(self) -> bool:
        """Whether nothing is split."""
        return self.size == 1

    def split(self, total: int, name: str) -> Range:
        """This rank's equal part (start, stop) of an axis; `name` is the config field that holds `total`.

        Raises:
            ConfigError: it does not divide.
        """
        return even_range(total, self.rank, self.size, name)

    def kv_heads(self, heads: int, name: str = "num_key_value_heads") -> Range:
        """The KV heads (start, stop) that this rank's query heads attend to; shared where there are fewer than ranks.

        Raises:
            ConfigError: neither number divides the other.
        """
        return kv_head_range(heads, self.rank, self.size, name)

    def padded(self, total: int, name: str = "vocab_size") -> Range:
        """This rank's part (start, stop) of an axis that need not divide; the last rank's may be shorter.

        Raises:
            ConfigError: a rank would hold nothing.
        """
        return padded_range(total, self.rank, self.size, name)
