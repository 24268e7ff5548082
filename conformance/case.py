"""A case: one op at one point of the grid, its name, and how to draw a trial of it.

    name     "gemm.exact/float32-m17-n48-k100"     stable: gaps.toml, reports and mutants refer to it
             family ─┘        └─ point

Cases are plain data and cheap to list; tensors exist only inside `build`. A case never sees a backend: only `Draw`,
which carries what the backend declares.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts, dtype_name
from octavo.conformance.lanes.accumulation import SCALED
from octavo.conformance.trial import Trial
from octavo.core.backend import OP_NAMES, OpSpec, QuantFormat, WeightSpec

Requirement = Callable[[Facts], str | None]
"""Why a case says nothing about a backend that declares these facts; None when it does."""

LEVEL_NAMES = ("model", "engine")
"""What stands for the op in cases above the ops (levels/), which have no spec."""

COMMUNICATOR = "communicator"
"""What stands for the op in cases of collectives: the backend's communicator, which nothing can stand in for."""

FLOAT8 = frozenset({QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ})

LANES = ("exact", "probe", "statistical", "distribution")
_NAME = re.compile(r"[a-z0-9_.]+/[A-Za-z0-9_.+-]+")


def always(_: Facts) -> str | None:
    """The requirement of a case that concerns every backend."""
    return None


@dataclass(frozen=True, eq=False)
class Case:
    """One point.

    Attributes:
        name: unique, stable, "family/point".
        op: of the contract; the one whose implementation is reported. COMMUNICATOR or the level, where no op is.
        spec: what `supports()` is asked; a KV layout in it is replaced by the backend's own. None where no op is.
        axes: grid axis -> value, for the report's matrix.
        lanes: that `check` reports on.
        build: draws the trial; pure in its Draw.
        profiles: that contain it, besides "full", which contains all.
        faults: mutants that it is there to catch, by name.
        requires: whether it concerns a backend at all.
        world: ranks of the group that it runs in, each with a backend of its own.
        is_large: it holds gigabytes: several at once might not fit the device.
        timeout_s: seconds that both attempts may take.
    """

    name: str
    op: str
    spec: OpSpec | None
    axes: Mapping[str, str]
    lanes: tuple[str, ...]
    build: Callable[[Draw], Trial]
    profiles: frozenset[str] = frozenset()
    faults: frozenset[str] = frozenset()
    requires: Requirement = field(default=always)
    world: int = 1
    is_large: bool = False
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"case name {self.name!r} must match {_NAME.pattern}")
        if self.op not in ((*LEVEL_NAMES, COMMUNICATOR) if self.spec is None else OP_NAMES):
            raise ValueError(f"case {self.name}: {self.op!r} is no op of the contract, or is no level and has no spec")
        if not self.lanes or not set(self.lanes) <= set(LANES):
            raise ValueError(f"case {self.name}: lanes {self.lanes} must be some of {LANES}")

    @property
    def family(self) -> str:
        return self.name.partition("/")[0]

    @property
    def summed_as(self) -> str:
        """The op as `Capabilities.accumulation` may name it: apart where 8-bit floats meet 8-bit floats."""
        weight = getattr(self.spec, "weight", None)
        scheme = weight.scheme if isinstance(weight, WeightSpec) else None
        is_scaled = scheme is not None and {scheme.format, scheme.activation} <= FLOAT8
        return self.op + SCALED if is_scaled else self.op

    @property
    def needs_device_alone(self) -> bool:
        """Whether no other case may run beside it."""
        return self.is_large or self.world > 1


def computes_in(*dtypes: torch.dtype) -> Requirement:
    """Only backends in which models compute in all of these dtypes."""

    def requirement(facts: Facts) -> str | None:
        missing = [dtype_name(d) for d in dtypes if dtype_name(d) not in facts.activations]
        return f"its models never compute in {', '.join(missing)}" if missing else None

    return requirement


def stores_weights_in(dtype: torch.dtype) -> Requirement:
    """Only backends that store plain weights in this dtype."""
    name = dtype_name(dtype)
    return lambda facts: None if name in facts.weights else f"it never stores weights in {name}"


def stores_kv_in(dtype: torch.dtype) -> Requirement:
    """Only backends that keep KV in this dtype."""
    name = dtype_name(dtype)
    return lambda facts: None if name in facts.kv_dtypes else f"it never keeps KV in {name}"


def forms_groups_of(world: int) -> Requirement:
    """Only backends that form groups of this many ranks on this machine."""
    return lambda facts: None if world in facts.world_sizes else f"it forms no groups of {world} here"


def holds_bytes(nbytes: int) -> Requirement:
    """Only devices of twice this memory: a pool counts while it lives, one at a time, though it is hardly touched."""
    return lambda facts: (
        None if facts.total_memory_bytes >= 2 * nbytes else f"a pool of {nbytes / 2**30:.1f} GiB is too large for it"
    )


def all_of(*requirements: Requirement) -> Requirement:
    """The first reason that any of them gives."""
    return lambda facts: next((why for r in requirements if (why := r(facts)) is not None), None)
