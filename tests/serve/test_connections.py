"""What strangers do to a connection: slow, endless, broken and unusual requests. They get an answer and harm nobody."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

from octavo.core.base.config import ServeConfig
from octavo.core.serve import body as body_module
from octavo.core.serve.body import MAX_CONTAINERS
from octavo.core.serve.connection import MAX_HEAD_BYTES
from tests.serve.conftest import Server, error_of
from tests.serve.scrapes import scrape

SECONDS = 60.0
ASK = json.dumps({"model": "tiny", "prompt": "ABC", "temperature": 0}).encode()
ANSWER = "DEFGH ok"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def hasty(chain_model: Path) -> Iterator[Server]:
    """A server that waits three seconds for a request's bytes."""
    settings = ServeConfig(read_timeout_seconds=3.0)
    made = Server(str(chain_model), settings, tokenizer="smollm2", max_num_seqs=2)
    with made:
        yield made


@pytest.fixture(scope="module")
def narrow(chain_model: Path) -> Iterator[Server]:
    """A server that takes bodies of a megabyte."""
    made = Server(str(chain_model), ServeConfig(max_body_bytes=1 << 20), tokenizer="smollm2", max_num_seqs=2)
    with made:
        yield made


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    received = b""
    with suppress(ConnectionError):  # there was more that it did not read when it closed
        while piece := connection.recv(1 << 16):
            received += piece
    return received


def say(server: Server, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the one answer to these bytes, which end with the request."""
    with connect(server) as connection:
        with suppress(ConnectionError):  # it has heard enough
            connection.sendall(data)
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 ") == 1, received[:500]
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("ascii").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


def error(body: bytes) -> str:
    """The message of an error in OpenAI's form."""
    ((name, found),) = json.loads(body).items()
    assert name == "error"
    assert set(found) == {"message", "type", "param", "code"}
    return str(found["message"])


# -- slow --------------------------------------------------------------------------------------------------------


BEGUN = {
    "nothing": b"",
    "head": b"GET /health HTTP/1.1\r\nHost",
    "body": POST + b"Content-Length: 1000\r\n\r\n{",
    "chunk": POST + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n{",
    "second": b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\n",
}
"""Requests that don't end."""


@pytest.mark.parametrize("trickles", [False, True])
def test_requests_that_do_not_end_are_ended(hasty: Server, trickles: bool) -> None:
    """Slow loris, in the head and in the body, silent and byte by byte."""
    received: dict[str, bytes] = {}

    def begin(name: str) -> None:
        with connect(hasty) as connection:
            connection.sendall(BEGUN[name])
            with suppress(ConnectionError):
                while trickles:
                    connection.sendall(b"a")
                    time.sleep(0.2)
            received[name] = read_all(connection)

    with ThreadPoolExecutor() as threads:
        list(threads.map(begin, BEGUN))
    assert set(received) == set(BEGUN)
    if not trickles:  # else the answer may be lost with what was sent behind it
        assert received.pop("nothing") == b""
        for answer in received.values():
            head, _, body = answer.rpartition(b"\r\n\r\n")
            assert b"HTTP/1.1 408 " in head
            assert "within 3 s" in error(body)
    assert hasty.http.get("/health").status_code == 200


def test_a_large_body_that_comes_steadily_is_taken(hasty: Server) -> None:
    """It takes longer than the window, in which it brings enough each time."""
    padded = ASK[:-1] + b', "user": "' + b"x" * (8 << 18) + b'"}'
    step = len(padded) // 8 + 1
    with connect(hasty) as connection:
        connection.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(padded))
        for start in range(0, len(padded), step):
            connection.sendall(padded[start : start + step])
            time.sleep(0.5)
        assert ANSWER.encode() in read_all(connection)


def test_a_reply_may_take_longer_than_its_request(hasty: Server) -> None:
    """The second request waits for the first reply, which takes its time."""
    long = json.dumps({"model": "tiny", "prompt": "Loop", "max_tokens": 1900, "temperature": 0, "ignore_eos": True})
    first = POST + b"Content-Length: %d\r\n\r\n" % len(long) + long.encode()
    second = POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(ASK) + ASK
    with connect(hasty) as connection:
        connection.sendall(first + second)
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 200 ") == 2
    assert received.endswith(b"}")
    assert ANSWER.encode() in received


def test_idle_connections_leave_room_and_go(hasty: Server) -> None:
    here = psutil.Process()
    before = here.num_fds()
    with ExitStack() as crowd:
        for _ in range(300):
            crowd.enter_context(connect(hasty))
        assert hasty.complete("ABC", temperature=0).choices[0].text == ANSWER
    deadline = time.monotonic() + SECONDS
    while here.num_fds() > before + 5:
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.05)


# -- large -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        b"X-A: " + b"a" * MAX_HEAD_BYTES,
        b"a: b\r\n" * (MAX_HEAD_BYTES // 6),
        b"X-Request-Id: " + b"a" * (4 << 20),
    ],
    ids=["one", "many", "endless"],
)
def test_a_head_too_large(server: Server, head: bytes) -> None:
    with connect(server) as connection:
        try:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n")
        except ConnectionError:
            return  # it has heard enough; its answer may be lost then
        received = read_all(connection)
    assert received == b"" or b"HTTP/1.1 431 " in received


def test_a_head_that_just_fits(server: Server) -> None:
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-A: "
    status, _, _ = say(server, head + b"a" * (MAX_HEAD_BYTES - len(head) - 100) + b"\r\n\r\n")
    assert status == 200


def test_a_body_that_is_announced_too_large_is_not_awaited(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"Content-Length: 10000000000\r\n\r\n")
        received = connection.recv(4096)
    assert b"HTTP/1.1 413 " in received


def test_a_body_that_takes_much_memory_is_refused(server: Server) -> None:
    """One of so many objects stopped every other request for seconds, and took a gigabyte."""
    bomb = b'{"model": "tiny", "prompt": "ABC", "x": [' + b"{}," * MAX_CONTAINERS + b"{}]}"
    response = server.http.post("/v1/completions", content=bomb, headers={"content-type": "application/json"})
    assert "arrays and objects" in error_of(response, 400)["message"]
    text = json.dumps({"model": "tiny", "prompt": "ABC", "temperature": 0, "user": "{}" * MAX_CONTAINERS})
    response = server.http.post("/v1/completions", content=text, headers={"content-type": "application/json"})
    assert response.json()["choices"][0]["text"] == ANSWER, "brackets in a text are none"


def test_bodies_that_never_end_do_not_fill_the_memory(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "ALL_BYTES", 1 << 20)
    endless = POST + b"Content-Length: 600000\r\n\r\n" + b" " * 590_000
    with ExitStack() as crowd:
        connections = [crowd.enter_context(connect(narrow)) for _ in range(3)]
        for connection in connections:
            connection.sendall(endless)
        refused, _, _ = select.select(connections, [], [], SECONDS)
        answer = refused[0].recv(1 << 16)
        assert b"HTTP/1.1 429 " in answer
        assert b"retry-after: 1" in answer.lower()
    # What the others held is free again once they have gone.
    deadline = time.monotonic() + SECONDS
    padded = ASK[:-1] + b', "user": "' + b"x" * 900_000 + b'"}'
    while say(narrow, POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(padded) + padded)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# -- unusual -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [None, 40, 230])
def test_an_offer_to_upgrade_is_passed_over(server: Server, split: int | None) -> None:
    """Java's client sends it with each request; the body was lost then."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\n"
    data = POST + offer + b"Content-Length: %d\r\n\r\n" % len(ASK) + ASK
    with connect(server) as connection:
        connection.sendall(data[:split])
        if split is not None:
            time.sleep(0.05)
            connection.sendall(data[split:])
        received = b""
        while not received.endswith(b"}}"):
            piece = connection.recv(1 << 16)
            assert piece, received
            received += piece
        assert received.startswith(b"HTTP/1.1 200 ")
        assert ANSWER.encode() in received
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b'"version"' in read_all(connection), "and the connection goes on"


def test_websockets_are_not_spoken(server: Server) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade, close\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    assert say(server, head + key)[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00" + bytes(range(128, 192)),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Request-Id: a\x1b[31mb\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Request-Id: a\r\n b\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + ASK,
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + ASK,
        POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n" + ASK,
    ],
)
def test_what_is_no_http_is_told_so(server: Server, data: bytes) -> None:
    status, headers, body = say(server, data)
    assert (status, headers["content-type"], headers["connection"]) == (400, "application/json", "close")
    assert "not valid HTTP" in error(body)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"gzip, identity"])
def test_a_compressed_body_is_refused_by_name(server: Server, encoding: bytes) -> None:
    data = POST + b"Connection: close\r\nContent-Encoding: %s\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00" % encoding
    status, _, body = say(server, data)
    assert status == 415
    assert "Content-Encoding" in error(body)


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    post = POST + b"Content-Length: %d\r\n\r\n" % len(ASK) + ASK
    get = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(post + get + post + last)
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 200 ") == 4
    places = [received.find(part) for part in (ANSWER.encode(), b'{"version"', b'{"status"')]
    assert places == sorted(places)
    assert received.rfind(ANSWER.encode()) > places[1]


def test_http_1_0(server: Server) -> None:
    status, headers, body = say(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert (status, body) == (200, b'{"status":"ok"}')
    assert headers["connection"] == "close"


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    got, head = server.http.get(path), server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert server.http.head("/v1/completions").status_code == 405


def test_an_id_that_could_forge_a_line_or_a_header_is_not_taken(server: Server) -> None:
    for sent in ("a" * 201, "a b", "\u00e9", ""):
        response = server.http.get("/health", headers={"x-request-id": sent.encode("latin-1")})  # type: ignore[dict-item]
        assert response.headers["x-request-id"] != sent
        assert response.headers["x-request-id"].isalnum()
    assert server.http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"


def test_a_client_that_vanishes_in_its_body_is_forgotten(server: Server) -> None:
    for cut in range(1, len(ASK), 7):
        with connect(server) as connection:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(ASK) + ASK[:cut])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
    assert server.complete("ABC", temperature=0).choices[0].text == ANSWER


def test_a_client_that_leaves_in_its_body_is_counted_as_gone(server: Server) -> None:
    before = left_in_body(server)
    with connect(server) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(ASK))
        assert b"100 Continue" in connection.recv(4096)
    deadline = time.monotonic() + SECONDS
    while left_in_body(server) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left_in_body(server: Server) -> int:
    """Completions whose client left, as /metrics counts them."""
    labels = frozenset({("path", "/v1/completions"), ("status", "499")})
    return int(scrape(server.http).samples.get(("octavo_http_requests_total", labels), 0))


def test_the_page_of_the_description_runs_nothing(server: Server) -> None:
    policy = server.http.get("/docs").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
