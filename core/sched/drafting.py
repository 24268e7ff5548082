"""Speculative decoding: guesses are computed behind a request's last token, and a step then gives more than one token.

    known tokens | draft draft draft        computed in one step, one row of logits each
                 └─ the runner draws at each row and keeps what it drew up to the first row whose guess was another

What is drawn at a position depends on (seed, choice, position) and the tokens before it alone, and a guess is kept
only where it is what was drawn: the reply is token by token the one without guesses, greedy or not, wherever the
backend gives a row the same logits in either batch. Guesses take only what is left over when everybody has been
served: budget, rows and blocks; nobody waits or gives way for them.

Source: Leviathan, Kalman and Matias 2023, "Fast inference from transformers via speculative decoding".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.request import Request
from octavo.core.sched.step import Step

LONGEST_REST = 64
"""Steps that a request goes without guesses, at most, because its last ones were wrong."""


class Drafter(Protocol):
    """Guesses tokens. A draft model enters here as prompt lookup does."""

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """At most num_tokens that may follow the request's known tokens; () where it has no guess."""

    def forget(self, request_id: str) -> None:
        """The request ended. Unknown ids are ignored."""


@dataclass(slots=True)
class _Record:
    """How a request's guesses went: how many to make next, wrong drafts in a row, steps to rest."""

    length: int
    misses: int = 0
    rest: int = 0


class Drafting:
    """Who gets how many guesses in a step. The scheduler owns it and asks at the end of each step's plan.

    Args:
        drafter: makes them.
        max_tokens: the most for one request in one step.
        max_rows: rows of logits that a step may ask for, a request's own among them.
        pays: number of requests in a step -> whether guesses have been worth their time in such steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_tokens: int,
        max_rows: int,
        pays: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._pays = pays
        self._records: dict[str, _Record] = {}

    def extend(self, step: Step, blocks: BlockManager, keep_free: int) -> None:
        """Add guesses to a step in which everybody has been served, and leave so many blocks free."""
        room = min(step.budget, self._max_rows - len(step.scheduled))
        if room <= 0 or step.preempted or not self._pays(len(step.scheduled)):
            return
        for request, num_tokens in step.scheduled:
            drafts = self._drafts_for(request, num_tokens, room) if step.proceeds(request) else ()
            if not drafts:
                continue
            new_ids = blocks.try_allocate(request, num_tokens + len(drafts), keep_free=keep_free)
            if new_ids is None:
                return
            step.draft(request, new_ids, drafts)
            room -= len(drafts)
            if room <= 0:
                return

    def saw(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step: guesses that hold are made longer, wrong ones shorter and then rarer."""
        record = self._records[request.request_id]
        if num_accepted:
            record.misses = 0
            record.length = min(self._max_tokens, 2 * num_accepted if num_accepted == num_drafted else num_accepted + 1)
        else:
            record.rest = min(LONGEST_REST, 2**record.misses)
            record.misses += 1
            record.length = 1 + self._max_tokens // 2

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._records.pop(request_id, None)
        self._drafter.forget(request_id)

    def _drafts_for(self, request: Request, num_tokens: int, room: int) -> tuple[int, ...]:
        """Guesses for a request that will draw; none where the draw depends on the tokens drawn before it."""
        outputs, sampling = request.output_token_ids, request.sampling
        # The last token of a reply is never computed, and the pool was checked for no more than that.
        room = min(room, request.max_tokens - len(outputs) - 1)
        if not outputs or room <= 0 or request.num_computed_tokens + num_tokens < request.num_tokens:
            return ()
        if sampling.edits_logits or sampling.structured is not None or len(outputs) < sampling.min_tokens:
            return ()
        record = self._records.setdefault(request.request_id, _Record(self._max_tokens))
        if record.rest:
            record.rest -= 1
            return ()
        return self._drafter.propose(request, min(room, record.length))
