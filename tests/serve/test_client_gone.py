"""A client that goes away ends its request, wherever it is, and nobody else's. vllm#54947."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack, closing
from typing import Any

import pytest

from octavo.core.base.params import FinishReason
from tests.fakes.chains import FOREVER
from tests.serve.conftest import Server


def send(server: Server, **fields: Any) -> socket.socket:
    """A connection on which a completion was asked for, and nothing read yet."""
    body = json.dumps({"model": "tiny", "ignore_eos": True} | FOREVER | fields).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + body)
    return connection


def aborts(server: Server) -> int:
    return server.stats().finished[FinishReason.ABORT]


@pytest.mark.parametrize("stream", [True, False])
def test_after_the_first_token(server: Server, stream: bool) -> None:
    before, generated = aborts(server), server.stats().generated_tokens
    with closing(send(server, prompt="Loop", stream=stream)):
        server.wait(lambda s: s.generated_tokens > generated + 2)
    server.wait_idle(1.0)
    assert aborts(server) == before + 1


@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(server: Server, stream: bool) -> None:
    before = aborts(server)
    with ExitStack() as running:
        for _ in range(4):
            running.enter_context(closing(send(server, prompt="Loop", stream=True)))
        server.wait(lambda s: s.num_running == 4)
        with closing(send(server, prompt="Loop", stream=stream)):
            server.wait(lambda s: s.num_waiting == 1)
        server.wait(lambda s: s.num_waiting == 0, 1.0)
        assert server.stats().num_running == 4
        assert aborts(server) == before + 1
    server.wait_idle(1.0)


@pytest.mark.parametrize("stream", [True, False])
def test_in_prefill(server: Server, stream: bool) -> None:
    """A prompt that is scored advances by few tokens a step, which gives the time to leave."""
    before, generated = aborts(server), server.stats().generated_tokens
    prompt = [44449] * 1900
    with closing(send(server, prompt=prompt, stream=stream, echo=True, logprobs=1, max_tokens=100)):
        server.wait(lambda s: s.num_running == 1)
    server.wait_idle(1.0)
    assert aborts(server) == before + 1
    assert server.stats().generated_tokens == generated, "it was over before the client left: this tests nothing"


def test_several_prompts_and_choices(server: Server) -> None:
    before = aborts(server)
    for stream in (True, False):
        with closing(send(server, prompt=["Loop", "Loop", "Loop"], n=2, stream=stream)):
            server.wait(lambda s: s.num_running == 4 and s.num_waiting == 2)
        server.wait_idle(1.0)
    assert aborts(server) == before + 12


def test_others_go_on(server: Server) -> None:
    with server.complete("Loop", stream=True, temperature=0, max_tokens=100) as neighbour:
        chunks = iter(neighbour)
        text = next(chunks).choices[0].text
        for stream in (True, False):
            with closing(send(server, prompt="Loop", stream=stream)):
                server.wait(lambda s: s.num_running == 2)
        text += "".join(chunk.choices[0].text for chunk in chunks)
    assert text == " one two three fourLoop" * 20


def test_a_client_that_does_not_read_holds_nobody_up(server: Server) -> None:
    with closing(send(server, prompt="Loop", stream=True, n=3)):
        started = time.monotonic()
        assert server.complete("Loop", temperature=0, max_tokens=50).usage.completion_tokens == 50
        assert time.monotonic() - started < 10
