"""Which choice of which request is where in its grammar: the engine's book.

    enter ──> compiling ── settle ──> state ── masks: what may come next ──> the step ── advance: what came ─┐
                  │  the gate holds it back        ^                                                         │
                  └── failed, or too late          └─────────────────────────────────────────────────────────┘

A state follows the tokens that its choice has got and nothing else, so a preemption does not touch it: the choice goes
on with the state it had. The engine is the only one to talk to it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.core.base.structured import StructuredOutput
from octavo.core.grammar.compiler import Compilation, GrammarCompiler, late
from octavo.core.sched.policy import Reason
from octavo.core.sched.request import Request

logger = logging.getLogger(__name__)

WAIT_S = 0.005
"""How long a step without work waits for a grammar before it looks for news."""


class GrammarBook:
    """States of an engine's choices. Also an AdmissionGate.

    Args:
        compiler: of the model's vocabulary.
        timeout_s: how long a grammar may take.
        num_threads: that compute masks; None: as many as suit the machine.
    """

    def __init__(self, compiler: GrammarCompiler, timeout_s: float, num_threads: int | None) -> None:
        self.compiler = compiler
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._compiling: dict[str, tuple[Compilation, float]] = {}
        self._states: dict[str, Any] = {}
        self._executor: Any = None

    def enter(self, name: str, structured: StructuredOutput) -> None:
        """A choice arrives; its grammar is compiled unless it is there."""
        self._compiling[name] = self.compiler.start(structured), time.monotonic() + self._timeout_s

    def leave(self, name: str) -> None:
        """A choice ended. Others are ignored."""
        self._compiling.pop(name, None)
        self._states.pop(name, None)

    def may_start(self, request: Request) -> Reason | None:
        """See AdmissionGate."""
        return Reason("its grammar is being compiled") if request.request_id in self._compiling else None

    def settle(self) -> dict[str, str]:
        """Take in what has been compiled. Returns the choices that can't go on, and why."""
        failed: dict[str, str] = {}
        for name, (compilation, deadline) in list(self._compiling.items()):
            if not compilation.done.is_set():
                if time.monotonic() > deadline:
                    failed[name] = late(self._timeout_s)
                continue
            del self._compiling[name]
            if compilation.error is not None:
                failed[name] = compilation.error
            else:
                self._states[name] = compilation.matcher.deep_copy()
        return failed

    def wait(self) -> None:
        """Wait a moment for a grammar, where one is being compiled."""
        for compilation, _ in self._compiling.values():
            compilation.done.wait(WAIT_S)
            return

    def masks(self, names: Iterable[str]) -> tuple[dict[str, bytes], dict[str, str]]:
        """Which tokens may come next for those of the choices that have a grammar.

        Returns:
            A bit for each token of the vocabulary, lowest id in the lowest bit; and the choices whose grammar turned
            out too complex, and why. (llguidance lets such a one end as if it were complete.)
        """
        found = [(name, state) for name in names if (state := self._states.get(name)) is not None]
        masks = self._computed(found)
        failed = {name: _trouble(state) for name, state in found if state.is_error()}
        return {name: mask for name, mask in masks.items() if name not in failed}, failed

    def _computed(self, found: Sequence[tuple[str, Any]]) -> dict[str, bytes]:
        if len(found) < 2:
            return {name: state.compute_bitmask() for name, state in found}
        from llguidance import LLExecutor
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        self._executor = self._executor or LLExecutor(num_threads=self._num_threads)
        bits = allocate_token_bitmask(len(found), self.compiler.vocab_size)
        fill_next_token_bitmask_par(self._executor, [(state, i) for i, (_, state) in enumerate(found)], bits)
        return {name: bits[i].tobytes() for i, (name, _) in enumerate(found)}

    def advance(self, name: str, token_ids: Sequence[int]) -> str | None:
        """A choice got tokens. Returns why it can't go on, if it can't."""
        state = self._states.get(name)
        if state is None or state.consume_tokens(list(token_ids)):
            return None
        return _trouble(state)


def _trouble(state: Any) -> str:
    """Why a choice can't go on; the library's own words hold pieces of the form and of the reply."""
    logger.debug("a grammar can't be followed: %s", state.get_error())
    return "the reply's grammar can't be followed any further, it is too complex; make it smaller or simpler"
