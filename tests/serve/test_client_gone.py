"""A client that goes away ends its request, wherever it is, and nobody else's. vllm#54947."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from octavo.core.base.params import FinishReason
from tests.fakes.chain_model import save_chain_model
from tests.fakes.chains import COUNTING, END, FOREVER, REPLY, VOCAB_SIZE
from tests.serve.conftest import Server

SECONDS = 1.0 if os.environ.get("OCTAVO_NIGHTLY") == "1" else 10.0
"""How soon nothing may be left of a request; beside other tests a second is too little."""

APIS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "completions": lambda text, limit: {"prompt": text, "max_tokens": limit},
    "chat/completions": lambda text, limit: {"messages": said(text), "max_tokens": limit},
    "responses": lambda text, limit: {"input": text, "max_output_tokens": limit},
    "messages": lambda text, limit: {"messages": said(text), "max_tokens": limit},
}
"""Path -> the fields of a request for so many tokens after a text."""

every_api = pytest.mark.parametrize("api", APIS)
streamed_or_not = pytest.mark.parametrize("stream", [True, False])


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One request at once, four tokens a step; chats and texts that end with "Loop" are continued for ever."""
    model = save_chain_model(tmp_path_factory.mktemp("endless"), [[REPLY[0], *COUNTING]], VOCAB_SIZE, END)
    made = Server(str(model), tokenizer="smollm2", max_num_seqs=1, max_num_batched_tokens=4)
    with made:
        yield made


def ask(server: Server, api: str, text: str, limit: int, stream: bool) -> socket.socket:
    """A connection on which a reply was asked for, and nothing read yet."""
    return post(server, api, {"model": "tiny", "temperature": 0, "stream": stream, **APIS[api](text, limit)})


def send(server: Server, **fields: Any) -> socket.socket:
    """The same for a completion without end."""
    return post(server, "completions", {"model": "tiny", "ignore_eos": True} | FOREVER | fields)


def post(server: Server, path: str, fields: dict[str, Any]) -> socket.socket:
    """A connection with a request on its way."""
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    connection.sendall(f"{head}\r\n\r\n".encode() + body)
    return connection


def aborts(server: Server) -> int:
    return server.stats().finished[FinishReason.ABORT]


@every_api
@streamed_or_not
def test_after_the_first_token(slow: Server, api: str, stream: bool) -> None:
    before, generated = aborts(slow), slow.stats().generated_tokens
    with closing(ask(slow, api, "Loop", 1900, stream)):
        slow.wait(lambda s: s.generated_tokens > generated + 2)
    slow.wait_idle(SECONDS)
    assert aborts(slow) == before + 1


@every_api
@streamed_or_not
def test_while_queued(slow: Server, api: str, stream: bool) -> None:
    before = aborts(slow)
    with closing(ask(slow, "completions", "Loop", 1900, True)):
        slow.wait(lambda s: s.num_running == 1)
        with closing(ask(slow, api, "Loop", 1900, stream)):
            slow.wait(lambda s: s.num_waiting == 1)
        slow.wait(lambda s: s.num_waiting == 0, SECONDS)
        assert slow.stats().num_running == 1
        assert aborts(slow) == before + 1
    slow.wait_idle(SECONDS)


@every_api
@streamed_or_not
def test_in_prefill(slow: Server, api: str, stream: bool) -> None:
    """Each has words of its own, since a cached prefix would be no work."""
    before, generated = aborts(slow), slow.stats().generated_tokens
    text = f"{api} {stream}" + f" {stream} {api}" * 300
    with closing(ask(slow, api, text, 20, stream)):
        slow.wait(lambda s: s.num_running == 1)
    slow.wait_idle(SECONDS)
    assert aborts(slow) == before + 1
    assert slow.stats().generated_tokens == generated, "it was over before the client left: this tests nothing"


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_prefill_of_a_scored_prompt(server: Server, stream: bool) -> None:
    """A prompt that is scored advances by few tokens a step, which gives the time to leave."""
    before, generated = aborts(server), server.stats().generated_tokens
    prompt = [44449] * 1900
    with closing(send(server, prompt=prompt, stream=stream, echo=True, logprobs=1, max_tokens=100)):
        server.wait(lambda s: s.num_running == 1)
    server.wait_idle(SECONDS)
    assert aborts(server) == before + 1
    assert server.stats().generated_tokens == generated, "it was over before the client left: this tests nothing"


def test_several_prompts_and_choices(server: Server) -> None:
    before = aborts(server)
    for stream in (True, False):
        with closing(send(server, prompt=["Loop", "Loop", "Loop"], n=2, stream=stream)):
            server.wait(lambda s: s.num_running == 4 and s.num_waiting == 2)
        server.wait_idle(SECONDS)
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
