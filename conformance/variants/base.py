"""How a variant is written: the reference ops with some of them computed otherwise, or cases drawn otherwise.

Variant ── ops: name -> op      ──► HostBackend       the mutants' twin: every case must pass
        ├─ declares                 accumulation classes, where it is coarser than fp32
        └─ alter(case) -> case      other data for the same op
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.conformance.case import Case
from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import ReferenceOps

Op = Callable[..., Any]
"""An op of the contract, with its signature, or prepare_weight."""


def unaltered(case: Case) -> Case:
    return case


@dataclass(frozen=True)
class Variant:
    """One honest backend.

    Attributes:
        what: one line: in what it differs.
        concerns: ops whose cases it runs.
        ops: op -> its own implementation; the others are the reference's.
        declares: op -> accumulation class.
        alter: another drawing of a case; None leaves a case out.
        cases: that only this variant runs, besides the suite's.
    """

    name: str
    what: str
    concerns: tuple[str, ...]
    ops: Mapping[str, Op] = field(default_factory=dict)
    declares: Mapping[str, str] = field(default_factory=dict)
    alter: Callable[[Case], Case | None] = unaltered
    cases: Callable[[], list[Case]] = list

    def make(self) -> HostBackend:
        """A fresh backend."""
        ops = ReferenceOps(torch.device("cpu"))
        for name, op in self.ops.items():
            setattr(ops, name, op)
        extra: dict[str, Any] = {"accumulation": {"default": "fp32", **self.declares}} if self.declares else {}
        return HostBackend(ops, name=f"variant-{self.name}", **extra)
