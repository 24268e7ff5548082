"""Kernels compiled ahead of time, for a chip that need not be there: what a backend offers, and what came out.

    BackendInfo.builds ──► list_builds(target) ──► [KernelBuild, …] ──build()──► BuildResult

A backend whose kernels are compiled when it runs can be held to their quality before a device exists: the suite's
profile `compile` builds every one and fails on any fault. Nothing here needs the device, nor its driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What the compiler made of one kernel.

    Attributes:
        figures: named by the backend: registers, spilled bytes, shared memory, instruction counts, predicted time, ….
        faults: what makes the kernel unfit for its chip, one line each; empty when nothing does.
    """

    figures: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()


class KernelBuild(Protocol):
    """One kernel with one set of launch parameters, for one chip.

    Attributes:
        name: stable and unique in its backend, "kernel/point"; the same characters as a case's name.
        op: of the contract, that launches it.
        target: the chip's architecture ("sm_90").
    """

    name: str
    op: str
    target: str

    def build(self) -> BuildResult:
        """Compile and read it. An exception is the compiler's refusal, and a fault."""


ListBuilds = Callable[[str | None], Sequence[KernelBuild]]
"""(target or None for the backend's default) -> its builds. Raises ConfigError for a target that it doesn't know."""
