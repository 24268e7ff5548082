"""HTTP/1.1 with as little as measuring needs: one request on a connection of its own, its body as it comes.

    connect ──► head and content at once ──► status ──► parts of the body, without their framing ──► end

A general client costs a tenth of a millisecond for each event and, with many requests at once, hundreds of milliseconds
before each is sent, and a benchmark would take all of it for the server's.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import urlsplit

READ_BYTES = 65536


class BrokenReply(Exception):
    """What came is no whole reply of HTTP/1.1."""


class Target(NamedTuple):
    """Where requests go. Made by `target_of`."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    prefix: str
    headers: Mapping[str, str]


class Reply(NamedTuple):
    """A reply whose head is here; `parts` is its body."""

    status: int
    parts: AsyncGenerator[bytes, None]


class Connection:
    """One connection and its one request. Use it as an async context manager, which opens and closes it.

    Raises:
        OSError: no connection, or it broke.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    async def __aenter__(self) -> Connection:
        where = self._target
        self._reader, self._writer = await asyncio.open_connection(where.host, where.port, ssl=where.tls)
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._target.tls is not None:
            self._writer.transport.abort()  # a farewell over TLS would wait for the other side's
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    async def post(self, path: str, content: bytes) -> Reply:
        """Send JSON and read the head of the reply.

        Raises:
            BrokenReply, OSError: there is none.
        """
        self._writer.write(_head(self._target, path, len(content)) + content)
        await self._writer.drain()
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            status = int(head.split(b" ", 2)[1])
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError):
            raise BrokenReply from None
        return Reply(status, self._body(_fields(head)))

    async def _body(self, fields: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        if "chunked" in fields.get("transfer-encoding", ""):
            framing = Chunks()
            while not framing.ended:
                if content := framing.feed(await self._read()):
                    yield content
            return
        left = int(fields["content-length"]) if "content-length" in fields else None
        while left is None or left > 0:
            content = await self._reader.read(READ_BYTES)
            if not content:
                break
            yield content
            left = None if left is None else left - len(content)
        if left:
            raise BrokenReply

    async def _read(self) -> bytes:
        part = await self._reader.read(READ_BYTES)
        if not part:
            raise BrokenReply
        return part


class Chunks:
    """Takes the framing off a chunked body. Owns what has come of a chunk that is not complete yet."""

    def __init__(self) -> None:
        self._unread = b""
        self.ended = False

    def feed(self, part: bytes) -> bytes:
        """The content that `part` completes. Raises BrokenReply where a length is none."""
        self._unread += part
        content = []
        while not self.ended and b"\r\n" in self._unread:
            head, _, rest = self._unread.partition(b"\r\n")
            try:
                length = int(head.split(b";")[0], 16)
            except ValueError:
                raise BrokenReply from None
            if len(rest) < length + 2:
                break
            self.ended = length == 0
            content.append(rest[:length])
            self._unread = rest[length + 2 :]
        return b"".join(content)


def target_of(url: str, headers: Mapping[str, str]) -> Target:
    """Where a URL leads; `headers` go with every request."""
    parts = urlsplit(url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    assert parts.hostname is not None  # address_of has looked
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path, headers)


def _head(target: Target, path: str, length: int) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    fields = {
        "Host": f"{host}:{target.port}",
        "Content-Type": "application/json",
        "Content-Length": str(length),
        "Connection": "close",
        **target.headers,
    }
    lines = [f"POST {target.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _fields(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").lower().split("\r\n")[1:]
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
