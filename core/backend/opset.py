"""Which implementation runs each op of a model: decided once, when the op is bound.

    bind(op, spec) ─► the backend has the op and supports() says yes ──► own: the backend's bound method itself
                      some part of its decomposition is own ───────────► composite (parts bound in turn)
                      otherwise ───────────────────────────────────────► fallback: reference/, logged once, counted

One OpSet per engine and device; models bind through it and never ask a backend themselves. Nothing is decided, and
nothing but a fallback's counter is touched, while a step runs. With strict=True a fallback is refused: `verify()`
names all of them at once, and one that is called all the same raises.

`embed` reads rows of a weight that somebody packed for a product, so it is own only where the packer is: see `bind`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch

from octavo.core.backend.composites import Decomposition, OpCall, decompositions
from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.kv import AttentionMetadata
from octavo.core.backend.ops import OP_NAMES, Ops, PackedWeight, StepPlan
from octavo.core.backend.reference.ops import ReferenceOps
from octavo.core.backend.specs import GemmSpec, GroupedGemmSpec, OpSpec, RowSpec, Unsupported, WeightSpec
from octavo.core.base.errors import BackendUnavailable, UnsupportedOp

log = logging.getLogger(__name__)

Implementation = Literal["own", "composite", "fallback"]


@dataclass(frozen=True, slots=True)
class OpChoice:
    """What runs an op at a spec.

    Attributes:
        reason: why it is not the backend's own; empty when it is.
        calls: calls so far of a fallback; always 0 for the others, which are not counted. They are the host's: a step
            that a device has recorded counts when it is recorded, and no more when it is replayed.
    """

    op: str
    spec: OpSpec
    implementation: Implementation
    reason: str
    calls: int


@dataclass(slots=True)
class _Choice:
    op: str
    spec: OpSpec
    implementation: Implementation
    reason: str = ""
    own_share: float = 0.0  # how much of it the backend runs itself, from 0 to 1
    splits: int = 0  # how often it was taken apart to get there
    decomposition: Decomposition | None = None
    call: OpCall | None = None
    calls: int = 0


class OpSet:
    """The ops of one device, gaps filled."""

    def __init__(self, backend: DeviceBackend, *, strict: bool = False, package: str = "") -> None:
        """
        Args:
            strict: refuse fallbacks to the reference (`--strict-backend`).
            package: that brings the backend, for errors.
        """
        self._name = backend.name
        self._title = f"backend {backend.name} of package {package}" if package else f"backend {backend.name}"
        self._own = backend.ops
        self._empty: Callable[[int, torch.dtype], torch.Tensor] = lambda n, dtype: backend.empty(n, dtype=dtype)
        self._reference = ReferenceOps(backend.device)
        self._strict = strict
        self._choices: dict[tuple[str, OpSpec, GemmSpec | None], _Choice] = {}
        self._bound: list[_Choice] = []
        self._logged: set[tuple[str, str]] = set()
        self._plan = self._own.plan if self._has("plan") else self._reference.plan

    def bind(self, op: str, spec: OpSpec, *, product: GemmSpec | None = None) -> Callable[..., Any]:
        """The callable that runs `op` at `spec`, with the op's signature. The same one for equal arguments.

        Args:
            product: for `embed`, what `prepare_weight` was given for the weight that is looked up: where the reference
                packed it, the reference looks it up too, since nobody else can read it. Where the backend packed it,
                `supports()` is told how: `RowSpec.weight`.

        Raises:
            ValueError: a name that is no op.
            BackendUnavailable: `supports()` gave no answer.
        """
        choice = self._resolve(op, spec, product)
        if choice.call is None:
            choice.call = self._build(choice)
            self._bound.append(choice)
        return choice.call

    def bind_when_called(self, op: str, spec: OpSpec, *, product: GemmSpec | None = None) -> Callable[..., Any]:
        """`bind` for a caller that may never call: the op counts, in `report` and `verify`, from its first call on.

        Who would run it is asked now all the same, and never in a step. Raises as `bind` does.
        """
        self._resolve(op, spec, product)

        def call(*args: Any, **kwargs: Any) -> None:
            self.bind(op, spec, product=product)(*args, **kwargs)

        return call

    def keeps_codes(self, spec: GemmSpec | GroupedGemmSpec) -> bool:
        """Whether the backend's own product, alone or within a composite, multiplies the codes of a quantised weight.

        Where it does not, a weight of this spec would be held dequantised. Binds nothing; raises as `bind` does.
        """
        own = self._own_product("gemm" if isinstance(spec, GemmSpec) else "grouped_gemm", spec)
        return own is not None and own.scheme is not None

    def prepare_weight(self, spec: GemmSpec | GroupedGemmSpec) -> PackedWeight:
        """Allocate the weight of a product, in the form of whoever runs its gemm. It serves `embed` as well."""
        own = self._own_product("gemm" if isinstance(spec, GemmSpec) else "grouped_gemm", spec)
        return self._reference.prepare_weight(spec.weight) if own is None else self._own.prepare_weight(own)

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        """One step's plan for one KV group; it serves the backend's attention and the reference's."""
        return self._plan(meta)

    def report(self) -> tuple[OpChoice, ...]:
        """What runs each op bound so far, parts of composites included, and how often fallbacks were called."""
        return tuple(OpChoice(c.op, c.spec, c.implementation, c.reason, c.calls) for c in self._bound)

    def verify(self) -> None:
        """When strict, raise BackendUnavailable naming every op bound so far that would fall back."""
        missing = sorted({f"{c.op} ({c.reason})" for c in self._bound if c.implementation == "fallback"})
        if self._strict and missing:
            raise BackendUnavailable(
                f"--strict-backend: {self._title} has no kernel of its own for {'; '.join(missing)}; "
                "run without the flag to let the reference ops fill in"
            )

    # -- resolution -------------------------------------------------------------------------------------------
    def _resolve(self, op: str, spec: OpSpec, product: GemmSpec | None = None) -> _Choice:
        if op not in OP_NAMES:
            raise ValueError(f"{op!r} is no op of the contract; see ops.OP_NAMES")
        key = (op, spec, product)
        if key not in self._choices:
            self._choices[key] = self._decide(op, spec, product)
        return self._choices[key]

    def _decide(self, op: str, spec: OpSpec, product: GemmSpec | None) -> _Choice:
        packed = None if product is None else self._own_product("gemm", product)
        if packed is not None and isinstance(spec, RowSpec):
            spec = replace(spec, weight=packed)
        reason = self._refusal(op, spec)
        if reason is None and product is not None and packed is None:
            reason = f"the reference packed its weight, since {self._resolve('gemm', product).reason}"
        if reason is None:
            return _Choice(op, spec, "own", own_share=1.0)
        best = _Choice(op, spec, "fallback", reason)
        for candidate in decompositions(op, spec):
            parts = [self._resolve(*part) for part in candidate.parts]
            share = sum(part.own_share for part in parts) / len(parts)
            splits = 1 + sum(part.splits for part in parts)
            if share > best.own_share or (share == best.own_share > 0 and splits < best.splits):
                best = _Choice(op, spec, "composite", reason, share, splits, candidate)
        return best

    def _refusal(self, op: str, spec: OpSpec) -> str | None:
        if not self._has(op):
            return f"{self._name} has no {op}"
        answer = _supported(self._title, self._own, op, spec)
        return None if answer is None else answer.reason

    def _has(self, name: str) -> bool:
        """Whether the backend implements a method: inheriting the protocol's empty body does not count."""
        method = getattr(self._own, name, None)
        return method is not None and getattr(type(self._own), name, None) is not getattr(Ops, name)

    def _own_product(self, op: str, spec: GemmSpec | GroupedGemmSpec) -> WeightSpec | None:
        """The weight as the backend's own product takes it, however deep inside a composite; None without one."""
        choice = self._resolve(op, spec)
        if choice.decomposition is None:
            return spec.weight if choice.implementation == "own" else None
        parts = ((o, s) for o, s in choice.decomposition.parts if isinstance(s, GemmSpec | GroupedGemmSpec))
        return next((own for o, s in parts if (own := self._own_product(o, s)) is not None), None)

    # -- building ---------------------------------------------------------------------------------------------
    def _build(self, choice: _Choice) -> OpCall:
        if choice.implementation == "own":
            return cast(OpCall, getattr(self._own, choice.op))
        if choice.decomposition is not None:
            parts = [self.bind(*part) for part in choice.decomposition.parts]
            return choice.decomposition.build(parts, self._empty)
        if self._strict:
            return self._refused(choice)
        self._log_fallback(choice)
        return _counted(choice, getattr(self._reference, choice.op))

    def _refused(self, choice: _Choice) -> OpCall:
        message = f"--strict-backend: {choice.op} would fall back to the reference: {choice.reason}"

        def refuse(*_args: Any, **_kwargs: Any) -> None:
            raise UnsupportedOp(message)

        return refuse

    def _log_fallback(self, choice: _Choice) -> None:
        key = (choice.op, choice.reason)
        if key not in self._logged:
            self._logged.add(key)
            log.warning("%s runs on the reference (slow): %s", choice.op, choice.reason)


def _supported(title: str, ops: Ops, op: str, spec: OpSpec) -> Unsupported | None:
    """What a backend says of an op that it brings. Raises BackendUnavailable where that is no answer."""
    try:
        answer = ops.supports(op, spec)
    except Exception as error:
        raise _no_answer(title, op, f"failed: {type(error).__name__}: {error}") from error
    if answer is None or isinstance(answer, Unsupported):
        return answer
    raise _no_answer(title, op, f"answered {answer!r}")


def _no_answer(title: str, op: str, what: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"supports({op!r}, …) of {title} {what}; it must answer None or Unsupported(reason): "
        "upgrade the package or report it to its authors",
        field="backend",
    )


def _counted(choice: _Choice, function: OpCall) -> OpCall:
    def call(*args: Any, **kwargs: Any) -> None:
        choice.calls += 1
        function(*args, **kwargs)

    return call
