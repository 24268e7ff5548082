"""How a mutant is written: the reference ops with one of them wrapped.

    Mutant ── wrap(honest op) ──► broken op ──► MutantOps (everything else is the reference) ──► HostBackend

Equal to the reference bit for bit off its trigger, so that what catches it has seen the fault and nothing else. A
wrapper also shows vendors what a fault that real devices shipped looks like from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import OP_NAMES, ReferenceOps

Op = Callable[..., None]
"""An op of the contract, with its signature."""


@dataclass(frozen=True)
class Mutant:
    """One broken backend.

    Attributes:
        name: as in the `faults` of cases: "gemm-k-tail-dropped".
        fault: one sentence: what the kernel does wrong, and when.
        source: where such a fault has been seen, in general terms.
        op: the op that is broken, or several that share the fault.
        wrap: makes the broken op of the reference's.
        backend: arguments of HostBackend that the fault needs (a layout, declared capabilities).
    """

    name: str
    fault: str
    source: str
    op: str | tuple[str, ...]
    wrap: Callable[[Op], Op]
    backend: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := set(self.ops) - {*OP_NAMES, "prepare_weight", "plan"}:
            raise ValueError(f"mutant {self.name}: {sorted(unknown)} are no ops of the contract")

    @property
    def ops(self) -> tuple[str, ...]:
        return (self.op,) if isinstance(self.op, str) else self.op

    def make(self) -> HostBackend:
        """A fresh backend with the fault in it."""
        return HostBackend(broken(self.ops, self.wrap), name=f"mutant-{self.name}", **self.backend)


def broken(ops: tuple[str, ...], wrap: Callable[[Op], Op]) -> ReferenceOps:
    """The reference ops, some of them wrapped."""
    broken_ops = ReferenceOps(torch.device("cpu"))
    for op in ops:
        setattr(broken_ops, op, wrap(getattr(broken_ops, op)))
    return broken_ops
