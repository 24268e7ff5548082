"""One connection: what a client may send before anybody reads it as a request, and how long it may take.

    bytes ──► head: at most MAX_HEAD_BYTES, else 431
         └──► every `read_timeout_seconds` the request must have come to its end, or MIN_BYTES of it have come; else 408
         └──► no HTTP: 400
         └──► Upgrade: an offer that is passed over, as HTTP lets a server do

uvicorn speaks the protocol; it waits without limit for a request that comes byte by byte, keeps whatever a head
brings, and loses the body of a request that offers an upgrade, as Java's client does with each (`Upgrade: h2c`). What a
stranger sends is told at the level debug: it must not fill the log.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.core.serve.failures import error_body, error_response

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and the headers."""

MIN_BYTES = 64 << 10
"""What must come of a request in each window of time that does not see its end."""

logger = logging.getLogger(__name__)


class Connection(HttpToolsProtocol):
    """uvicorn's, with limits.

    Args:
        read_timeout_seconds: the window of time.
    """

    def __init__(self, *args: Any, read_timeout_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._window_seconds = read_timeout_seconds
        self._window: asyncio.TimerHandle | None = None
        self._window_bytes = 0
        self._head_bytes = 0  # of the headers that are whole
        self._partial_bytes = 0  # that came since the head began, the piece in which it began left out
        self._reads_head = self._reads = False
        self._is_silent = True
        self._refusal = 400, "the request is not valid HTTP/1.1"

    # -- from the event loop -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        super().connection_made(transport)
        self._open_window()

    def data_received(self, data: bytes) -> None:
        """Some bytes have come."""
        self._unset_keepalive_if_required()
        self._is_silent = False
        began_before = self._reads_head
        try:
            self._feed(data)
            if self._reads_head and began_before:
                self._partial_bytes += len(data)
                self._check_head(self._partial_bytes)
        except httptools.HttpParserError:
            self._refuse(*self._refusal)
            return
        self._window_bytes += len(data)
        if not self._reads:
            self._close_window()
        elif self._window is None:
            self._open_window()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._close_window()
        super().connection_lost(exc)

    # -- from the parser -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._reads_head = self._reads = True
        self._head_bytes = self._partial_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        super().on_url(url)
        self._head_bytes += len(url)
        self._check_head(self._head_bytes)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header."""
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value) + 4
        self._check_head(self._head_bytes)

    def on_headers_complete(self) -> None:
        """The head's end."""
        if not self.parser.should_upgrade():
            self._reads_head = False
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request's end."""
        if not self.parser.should_upgrade():
            self._reads = False
            super().on_message_complete()

    # ------------------------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser takes it for accepted: for it the request ends with its head. So it reads another one.
            if self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError from offer
            head = self._head_without_offer()
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + data[offer.args[0] :])

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in _tokens(value) if each in (b"close", b"keep-alive"))
            if name not in (b"upgrade", b"http2-settings"):
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _check_head(self, num_bytes: int) -> None:
        if num_bytes > MAX_HEAD_BYTES:
            self._refusal = 431, f"the head of the request has more than {MAX_HEAD_BYTES} bytes; send fewer headers"
            raise httptools.HttpParserError

    def _open_window(self) -> None:
        self._window_bytes = 0
        self._window = self.loop.call_later(self._window_seconds, self._end_window)

    def _close_window(self) -> None:
        if self._window is not None:
            self._window.cancel()
            self._window = None

    def _end_window(self) -> None:
        self._window = None
        if self.transport.is_closing():
            return
        if self._waits_for_us() or self._window_bytes >= MIN_BYTES:
            self._open_window()
        else:
            self._refuse(408, f"the request did not come within {self._window_seconds:g} s; send it faster")

    def _waits_for_us(self) -> bool:
        """Whether a reply to an earlier request, or a reader that is slow, holds this request back."""
        answering = self.cycle is not None and not self.cycle.response_complete
        return self.flow.read_paused or (answering and self._reads_head)

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless a reply has begun or nobody asked; then close."""
        logger.debug("a connection was closed with %d: %s", status, message)
        self._close_window()
        is_answering = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not is_answering and not self._is_silent:
            path = "" if self._reads_head or self.scope is None else self.scope.get("path", "")
            body = error_response(path, status, error_body(message, "invalid_request_error")).body
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
        self.transport.close()


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
