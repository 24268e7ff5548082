"""Where a case's numbers come from: one generator per (run seed, case name), so that a case reruns alone.

The run's seed is fresh unless the user gives one, so that no plug-in can hold answers made beforehand. It is no secret:
it is drawn from in the process in which the backend runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import torch

from octavo.conformance.facts import Facts
from octavo.conformance.lanes.accumulation import Accumulation, accumulation

T = TypeVar("T")


def case_seed(run_seed: int, name: str) -> int:
    """A 63-bit seed of its own for each case, the same in every process."""
    digest = hashlib.sha256(f"{run_seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Draw:
    """Random host tensors for one case.

    Attributes:
        generator: the case's own.
        facts: what the backend declares.
        accumulation: the class it declares for the case's op; budgets and bounds are taken from it.
        rank: whose trial is drawn, in a case of a group. All ranks draw the same numbers and take their part of them.
    """

    def __init__(self, run_seed: int, name: str, op: str, facts: Facts, *, rank: int = 0) -> None:
        """op: as `Case.summed_as` has it."""
        self.generator = torch.Generator().manual_seed(case_seed(run_seed, name))
        self.facts = facts
        self.rank = rank
        self.accumulation: Accumulation = accumulation(facts.accumulation_of(op))

    def normal(
        self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, std: float = 1.0
    ) -> torch.Tensor:
        """Normal numbers, rounded to dtype."""
        return (torch.randn(shape, generator=self.generator) * std + mean).to(dtype)

    def uniform(
        self, *shape: int, dtype: torch.dtype = torch.float32, low: float = 0.0, high: float = 1.0
    ) -> torch.Tensor:
        """Uniform numbers in [low, high), rounded to dtype."""
        return (torch.rand(shape, generator=self.generator) * (high - low) + low).to(dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Whole numbers low .. high, both included, held as dtype."""
        return torch.randint(low, high + 1, shape, generator=self.generator).to(dtype)

    def signs(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """±1."""
        return self.integers(0, 1, *shape, dtype=torch.float32).mul_(2).sub_(1).to(dtype)

    def permutation(self, count: int) -> list[int]:
        """0 .. count - 1, shuffled."""
        return [int(i) for i in torch.randperm(count, generator=self.generator)]

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[int(torch.randint(len(items), (), generator=self.generator))]
