"""A look into the engine process, asked for by its front.

    read_state() ──┐
    read_state() ──┴─ ReadState ──> engine process        callers that come while one asks share its answer, so that
                   <── StateRead ──                       however many look, the engine draws one picture at a time

The engine answers between two steps and does nothing for it while nobody asks.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from octavo.core.base.errors import EngineDead
from octavo.core.engine import messages

if TYPE_CHECKING:
    from octavo.core.engine.front import Front


class StateDesk:
    """The question that is under way, if one is.

    Args:
        send: a message to the engine process; raises EngineDead.
    """

    def __init__(self, send: Callable[[messages.ToEngine], None]) -> None:
        self._send = send
        self._asked: asyncio.Future[messages.StateRead] | None = None

    async def read(self) -> messages.StateRead:
        """The engine's state now, or a moment ago. Raises EngineDead."""
        if self._asked is None:
            self._send(messages.ReadState())
            self._asked = asyncio.get_running_loop().create_future()
        # Shielded: a caller that goes away must not take the answer from the others.
        return await asyncio.shield(self._asked)

    def take(self, answer: messages.StateRead) -> None:
        """Hand the answer to all who wait for it."""
        asked, self._asked = self._asked, None
        if asked is not None and not asked.done():
            asked.set_result(answer)

    def end(self, cause: str) -> None:
        """The engine is gone: nobody gets an answer."""
        asked, self._asked = self._asked, None
        if asked is not None and not asked.done():
            asked.set_exception(EngineDead(cause))
            asked.exception()  # seen: perhaps nobody waits any more


class AsyncStateMethods(ABC):
    """What `AsyncEngine` adds for those who look at it."""

    @property
    @abstractmethod
    def _started(self) -> Front:
        """What it has once a model is loaded. Raises EngineDead before the start and after the end."""

    async def read_state(self) -> messages.StateRead:
        """The scheduler's figures and a picture of the KV pool, taken between two steps.

        Raises:
            EngineDead: the engine ended.
        """
        return await self._started.states.read()
