"""How a mutant is written: the reference ops with one of them wrapped.

    Mutant ── wrap(honest op) ──► broken op ──► MutantOps (everything else is the reference) ──► HostBackend

    @before   changes the arguments, by the contract's parameter names       scores scaled wrongly, a table misread
    @after    changes what was written                                       a wrong row, NaN
    @around   calls the op itself, once, often or not at all                 rows left as they were, work split up

Equal to the reference bit for bit off its trigger, so that what catches it has seen the fault and nothing else. A
wrapper also shows vendors what a fault that real devices shipped looks like from outside.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import OP_NAMES, DeviceBackend, ReferenceOps

Op = Callable[..., Any]
"""An op of the contract, with its signature."""

Wrap = Callable[[Op], Op]

Call = dict[str, Any]
"""Arguments of a call by the contract's names, defaults filled in."""


def reference_ops() -> ReferenceOps:
    """Fresh reference ops on the host."""
    return ReferenceOps(torch.device("cpu"))


@dataclass(frozen=True)
class Mutant:
    """One broken backend.

    Attributes:
        name: as in the `faults` of cases: "gemm-bias-dropped".
        fault: one sentence: what the kernel does wrong, and when.
        source: where such a fault has been seen, in general terms.
        op: the op that is broken, or several that share the fault.
        wrap: makes the broken op of the reference's.
        backend: arguments of HostBackend that the fault needs (a layout, declared capabilities).
        host: what the broken ops run on.
        honest_ops: makes the ops that are broken: the reference's, or another honest form of them.
    """

    name: str
    fault: str
    source: str
    op: str | tuple[str, ...]
    wrap: Wrap
    backend: Mapping[str, Any] = field(default_factory=dict)
    host: Callable[..., DeviceBackend] = HostBackend
    honest_ops: Callable[[], ReferenceOps] = reference_ops

    def __post_init__(self) -> None:
        if unknown := set(self.ops) - {*OP_NAMES, "prepare_weight", "plan"}:
            raise ValueError(f"mutant {self.name}: {sorted(unknown)} are no ops of the contract")

    @property
    def ops(self) -> tuple[str, ...]:
        return (self.op,) if isinstance(self.op, str) else self.op

    def make(self) -> DeviceBackend:
        """A fresh backend with the fault in it."""
        ops = broken(self.ops, self.wrap, self.honest_ops)
        return self.host(ops, name=f"mutant-{self.name}", **self.backend)


def broken(names: tuple[str, ...], wrap: Wrap, honest_ops: Callable[[], ReferenceOps] = reference_ops) -> ReferenceOps:
    """Honest ops, some of them wrapped."""
    ops = honest_ops()
    for name in names:
        setattr(ops, name, wrap(getattr(ops, name)))
    return ops


def around(fault: Callable[[Op, Call], Any]) -> Wrap:
    """`fault` is given the honest op and the call's arguments, and does what the broken op does."""

    def wrap(honest: Op) -> Op:
        signature = inspect.signature(honest)

        @functools.wraps(honest)
        def op(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return fault(honest, dict(bound.arguments))

        return op

    return functools.wraps(fault)(wrap)


def before(change: Callable[[Call], None]) -> Wrap:
    """`change` alters the arguments, which it must replace and never write into."""

    def fault(honest: Op, call: Call) -> Any:
        change(call)
        return honest(**call)

    return around(functools.wraps(change)(fault))


def after(change: Callable[[Call], None]) -> Wrap:
    """`change` alters what the honest op wrote."""

    def fault(honest: Op, call: Call) -> Any:
        result = honest(**call)
        change(call)
        return result

    return around(functools.wraps(change)(fault))


def unwritten(honest: Op, call: Call, *outputs: str, at: Any) -> None:
    """Run the op and put back what `output[at]` of each output (that was asked for) held before."""
    asked = [call[name] for name in outputs if call[name] is not None]
    held = [out[at].clone() for out in asked]
    honest(**call)
    for out, old in zip(asked, held, strict=True):
        out[at] = old


def nudge(out: torch.Tensor, count: int) -> None:
    """Another rounding of one element, another one for each count: what an atomic addition leaves behind."""
    if out.numel():
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(count * 7919 % out.numel()), out.shape))
        out[at] = out[at] * (1 + 2 * torch.finfo(out.dtype).eps)
