"""Loading and unloading adapters in an engine process, as its front asks for it.

    load_adapter() ── LoadAdapter(call) ──> engine process          a future for each call
    unload_adapter() ─ UnloadAdapter ─────> engine process
    list_adapters() <── AdaptersChanged(call, all adapters, what was refused) ──

Only this front changes the adapters, so that what the last answer told is what there is: the list costs no question.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from octavo.core.base.errors import EngineDead
from octavo.core.base.lora import AdapterInfo, LoRARequest
from octavo.core.engine import messages


class AdapterDesk:
    """The adapters of an engine process, and the calls that wait for an answer about them.

    Args:
        send: a message to the engine process; raises EngineDead.
        adapters: those of the start.
    """

    def __init__(self, send: Callable[[messages.ToEngine], None], adapters: Sequence[AdapterInfo]) -> None:
        self._send = send
        self._calls = itertools.count()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._known = {info.name: info for info in adapters}

    @property
    def known(self) -> dict[str, AdapterInfo]:
        """The adapters by name."""
        return dict(self._known)

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter, or give its name another content. Raises UserError, EngineDead."""
        await self._ask(lambda call: messages.LoadAdapter(call, name, path))
        return self._known[name]

    async def unload(self, name: str) -> None:
        """Take a name away. Raises InvalidRequest, EngineDead."""
        await self._ask(lambda call: messages.UnloadAdapter(call, name))

    async def ensure(self, request: LoRARequest) -> None:
        """Load what a request names, unless the name means the adapter at that path. Raises as `load`."""
        known = self._known.get(request.lora_name)
        if request.lora_path and (known is None or known.path != request.lora_path):
            await self.load(request.lora_name, request.lora_path)

    def take(self, answer: messages.AdaptersChanged) -> None:
        """Hand an answer to its call."""
        self._known = {info.name: info for info in answer.adapters}
        future = self._waiting.pop(answer.call, None)
        if future is None or future.done():  # nobody waits any more
            return
        if answer.refused is None:
            future.set_result(None)
        else:
            future.set_exception(messages.error_of(answer.refused))

    def end(self, cause: str) -> None:
        """The engine is gone: no call gets an answer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineDead(cause))
        self._waiting.clear()

    async def _ask(self, message: Callable[[int], messages.ToEngine]) -> None:
        call = next(self._calls)
        future = self._waiting[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            await future
        finally:
            self._waiting.pop(call, None)


class AsyncAdapterMethods(ABC):
    """What `AsyncEngine` adds for adapters: `LLM`'s methods, awaited."""

    @property
    @abstractmethod
    def _desk(self) -> AdapterDesk:
        """Of the engine process. Raises EngineDead before the start."""

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Read a low-rank adapter, a PEFT directory; from now on the name means its content.

        Raises:
            InvalidRequest: the engine was started without enable_lora and lora_modules.
            CheckpointError: its files can't be used; what the name meant before, it still means.
            EngineDead: the engine ended.
        """
        return await self._desk.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away and free its weights; requests that were accepted end with it as it was.

        Raises:
            InvalidRequest: nothing has that name.
            EngineDead: the engine ended.
        """
        await self._desk.unload(name)

    def list_adapters(self) -> list[AdapterInfo]:
        """The adapters that requests may name."""
        return list(self._desk.known.values())
