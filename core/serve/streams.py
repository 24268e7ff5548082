"""Waiting for a reply while its client may leave, and server-sent events.

    unless_gone(receive, work)    the work's result; when the client leaves first, the work is cancelled
    open_stream(...)              the first piece, so that a refused request is a plain error ...
    EventStream                   ... then events until the reply's own end, or until the client leaves

Cancelling the work closes its streams, and that ends its requests in the engine: streaming, waiting or in prefill.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from octavo.core.engine.outputs import RequestOutput
from octavo.core.serve.replies import Reply, check_choices

T = TypeVar("T")
Pieces = AsyncGenerator[tuple[int, RequestOutput], None]


class ClientGone(Exception):
    """The client closed its connection before the reply was complete."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await work for a client whose request body was read before.

    Raises:
        ClientGone: the client left; the work was cancelled and has ended.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def open_stream(receive: Receive, pieces: Pieces, reply: Reply) -> AsyncGenerator[bytes]:
    """The events of a reply, once its first piece is there.

    Raises:
        InvalidRequest, RequestFailed, EngineDead: nothing was streamed.
        ClientGone: the client left before the first piece.
    """
    try:
        first = await unless_gone(receive, _first(pieces))
        check_choices(first[1])
    except BaseException:
        await pieces.aclose()
        raise
    return _events(first, pieces, reply)


class EventStream(StreamingResponse):
    """Server-sent events; they end early when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers={**headers, "cache-control": "no-cache"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        async with aclosing(self._events):
            try:
                await unless_gone(receive, self.stream_response(send))
            except ClientGone:
                return


async def _events(first: tuple[int, RequestOutput], pieces: Pieces, reply: Reply) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(pieces):
            item: tuple[int, RequestOutput] | None = first
            while item is not None:
                if events := reply.events(*item):
                    yield events
                check_choices(item[1])
                item = await anext(pieces, None)
        last = reply.end()
    except Exception as error:
        last = reply.failure(error)
    yield last


async def _first(pieces: Pieces) -> tuple[int, RequestOutput]:
    return await anext(pieces)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
