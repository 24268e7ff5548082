"""A backend's ops put together from groups of kernels, each with a file of its own.

A group answers `supports(op, spec)` for its ops and has a method for each. The whole takes those methods as attributes
of its own, so that a call costs nothing extra, and an op that no group brings is absent, by which OpSet knows.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.backend.specs import OpSpec, Unsupported


class OpGroup(Protocol):
    """Some ops of a backend."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when the group runs `op` at `spec`; asked only for its own ops."""


class OpGroups:
    """The ops of one backend."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._groups: dict[str, OpGroup] = {}

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when a kernel of the backend runs `op` at `spec`, else why not."""
        group = self._groups.get(op)
        if group is None:
            return Unsupported(f"{self._name} has no kernel for {op}")
        return group.supports(op, spec)

    def take(self, group: OpGroup, *, ops: tuple[str, ...], besides: tuple[str, ...] = ()) -> None:
        """Adopt a group's methods: its ops, and what else of the Ops protocol it implements."""
        self._groups |= dict.fromkeys(ops, group)
        for name in (*ops, *besides):
            setattr(self, name, getattr(group, name))
