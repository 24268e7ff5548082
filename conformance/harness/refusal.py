"""Whether a backend means what supports() says.

    answers            asked twice before a case and once after it, supports() says the same each time
    ran_all_the_same   a refused op, called as if it had been accepted, must raise

A refusal is no free way out of a case: `unsupported` stands only for an op that raises when it is called. Otherwise
supports() hides a kernel that works, or the kernel gives numbers for what it was never written for.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from octavo.conformance.case import Case
from octavo.conformance.harness.bench import Bench
from octavo.conformance.harness.poison import Poison
from octavo.conformance.trial import Trial
from octavo.core.backend import DeviceBackend, Ops, OpSpec, Unsupported


def answers(backend: DeviceBackend, op: str, spec: OpSpec) -> list[Unsupported | None]:
    """What supports() says of an op that the backend brings, asked twice; nothing of one that it lacks."""
    return [backend.ops.supports(op, spec) for _ in range(2)] if _brings(backend.ops, op) else []


def wavering(said: list[Unsupported | None]) -> list[str]:
    """A fault when answers to one question differ."""
    return [
        f"supports() is not pure: it answered {said[0]}, and asked the same again {other}"
        for other in said
        if other != said[0]
    ][:1]


def ran_all_the_same(case: Case, trial: Trial, backend: DeviceBackend) -> bool:
    """Whether the op of a case ends without an error where supports() is not asked about it."""
    if not _brings(backend.ops, case.op):
        return False
    try:
        bench = Bench(trial, cast(DeviceBackend, _Unasked(backend, case.op)), Poison.NAN)
        with torch.no_grad():
            trial.run(bench)
        bench.read()
    except Exception:
        return False
    return any(choice.op == case.op and choice.implementation == "own" for choice in bench.opset.report())


def _brings(ops: Ops, op: str) -> bool:
    """Whether ops implement an op: inheriting the protocol's empty body does not count."""
    return hasattr(ops, op) and getattr(type(ops), op, None) is not getattr(Ops, op)


class _Unasked:
    """A backend that is taken to support one op everywhere."""

    def __init__(self, backend: DeviceBackend, op: str) -> None:
        self._backend = backend
        self.ops = _Willing(backend.ops, op)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class _Willing:
    """A backend's ops, each as it is; those that it lacks stay missing."""

    def __init__(self, ops: Ops, op: str) -> None:
        self._ops = ops
        self._op = op

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return None if op == self._op else self._ops.supports(op, spec)

    def __getattr__(self, name: str) -> Any:
        if name in vars(Ops) and not _brings(self._ops, name):
            raise AttributeError(name)
        return getattr(self._ops, name)
