"""Runs a batch through the server's own app, in this process: every check at the door is the one that clients meet.

    input file ──► read_jobs ──► max_in_flight workers ──► app (ASGI, no socket) ──► AsyncEngine
                                        └──────────────► BatchOutput, a line as each ends

What is in memory is what is in flight. Lines come out in the order in which they end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Scope

from octavo.core.base.errors import EngineDead
from octavo.core.serve.batch.lines import BadLine, Job, answer_line, error_line
from octavo.core.serve.batch.output import BatchOutput


@dataclass(slots=True)
class Counts:
    """How many lines were answered with status 200, and how many otherwise."""

    answered: int = 0
    failed: int = 0


class Answer(NamedTuple):
    """What the app said."""

    status: int
    request_id: str
    body: bytes


async def run_batch(
    app: ASGIApp,
    jobs: Iterator[Job | BadLine],
    output: BatchOutput,
    counts: Counts,
    *,
    max_in_flight: int,
    cause_of_end: Callable[[], str | None],
) -> None:
    """Answer every job.

    Args:
        counts: kept up to date.
        max_in_flight: requests that the app has at once.
        cause_of_end: why the engine is gone; None while it serves.

    Raises:
        EngineDead: the engine is gone; lines it could not answer are not written.
        ConfigError: the output can't be written.
    """

    async def work() -> None:
        for job in jobs:
            if isinstance(job, BadLine):
                output.write(error_line(job))
                counts.failed += 1
                await asyncio.sleep(0)  # a file of nothing else must not hold up the others
                continue
            answer = await post(app, job.url, job.body)
            if (cause := cause_of_end()) is not None:
                raise EngineDead(cause)
            output.write(answer_line(job, *answer))
            if answer.status == 200:
                counts.answered += 1
            else:
                counts.failed += 1

    workers = [asyncio.create_task(work()) for _ in range(max_in_flight)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Ask an app as a client does, without a socket. Cancelling this ends the request in the engine."""
    unread, parts, starts = [body], [], []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # this client never leaves; whoever waits for it is cancelled
        raise AssertionError("unreachable")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            starts.append(message)
        else:
            parts.append(message.get("body", b""))

    try:
        await app(_scope(path, len(body)), receive, send)
    except Exception:
        if not starts:  # otherwise it has answered 500, logged the cause, and raises it for a server to see
            raise
    request_id = next((value for name, value in starts[0]["headers"] if name == b"x-request-id"), b"")
    return Answer(starts[0]["status"], request_id.decode("latin-1"), b"".join(parts))


def _scope(path: str, length: int) -> Scope:
    headers = [(b"host", b"octavo"), (b"content-type", b"application/json"), (b"content-length", str(length).encode())]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "headers": headers,
        "client": None, "server": ("octavo", 80), "state": {},
    }  # fmt: skip
