"""Running the prompts of one HTTP request: all at once to their end, or piece by piece as server-sent events.

A client that goes away ends its requests in the engine, whether it was streaming or waiting for the whole body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request

from octavo.core.base.errors import OctavoError, RequestFailed
from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import RequestOutput
from octavo.core.serve.failures import body_of
from octavo.core.serve.replies import Usage


class Reply(Protocol):
    """What turns pieces into chunks; see replies.py."""

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[dict[str, Any]]:
        """What a piece adds to the stream."""

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The last chunk of a stream that includes usage."""


class ClientGone(Exception):
    """The client closed its connection before the reply was complete."""


async def run_to_end(request: Request, replies: Sequence[Awaitable[RequestOutput]]) -> list[RequestOutput]:
    """Await the replies to all prompts of a request.

    Raises:
        ClientGone: the client left; its requests are ended.
        RequestFailed: a choice failed by itself.
        InvalidRequest, EngineDead: as the engine says.
    """
    work: asyncio.Future[Any] = asyncio.gather(*replies)
    gone: asyncio.Future[Any] = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        outputs: list[RequestOutput] = work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)
    for output in outputs:
        check_choices(output)
    return outputs


async def open_stream(
    streams: Sequence[AsyncIterator[RequestOutput]], reply: Reply, *, include_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of all prompts' replies, merged as they come, ended by [DONE].

    Awaiting this waits for the first piece, so that a refused request raises before the response has begun.

    Raises:
        InvalidRequest, EngineDead: nothing was streamed.
    """
    merged = _merge(streams)
    try:
        first = await anext(merged)
    except BaseException:
        await merged.aclose()
        raise
    return _events(first, merged, reply, include_usage=include_usage)


async def _events(
    first: tuple[int, RequestOutput],
    merged: AsyncGenerator[tuple[int, RequestOutput]],
    reply: Reply,
    *,
    include_usage: bool,
) -> AsyncIterator[str]:
    usage = _StreamUsage()
    try:
        async with aclosing(merged):
            piece: tuple[int, RequestOutput] | None = first
            while piece is not None:
                usage.add(*piece)
                for chunk in reply.chunks(*piece):
                    yield _event(chunk)
                check_choices(piece[1])
                piece = await anext(merged, None)
        if include_usage:
            yield _event(reply.usage_chunk(usage.total()))
    except OctavoError as error:
        yield _event(body_of(error)[1])
    yield "data: [DONE]\n\n"


async def _merge(
    streams: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """(stream index, piece) of several streams as they come; closing it closes them."""
    queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue()

    async def forward(index: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async for piece in stream:
                queue.put_nowait((index, piece))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _StreamUsage:
    """Usage of a stream, from its pieces."""

    def __init__(self) -> None:
        self._prompts: dict[int, RequestOutput] = {}
        self._completion_tokens = 0

    def add(self, prompt_index: int, piece: RequestOutput) -> None:
        self._prompts[prompt_index] = piece
        self._completion_tokens += sum(len(choice.token_ids) for choice in piece.outputs)

    def total(self) -> Usage:
        return Usage(
            prompt_tokens=sum(len(piece.prompt_token_ids) for piece in self._prompts.values()),
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(piece.num_cached_tokens for piece in self._prompts.values()),
        )


def check_choices(output: RequestOutput) -> None:
    """Raise RequestFailed when a choice failed by itself."""
    for choice in output.outputs:
        if choice.finish_reason is FinishReason.ERROR:
            raise RequestFailed(choice.error or "the request failed")


async def _until_gone(request: Request) -> None:
    """Return when the client has closed its connection; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n"
