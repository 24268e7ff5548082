"""Four times as much as the server can bear: every request is answered rightly or told to come back, and nothing stays.

2,000 requests in `make nightly`, hundreds in `make test`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from octavo.core.base.config import ServeConfig
from octavo.core.cli.serving.requests import arrival_seconds
from octavo.core.cli.serving.wire import Connection, Target, target_of
from tests.serve.conftest import Server

COUNT = 2000 if os.environ.get("OCTAVO_NIGHTLY") == "1" else 400
QUEUE = 24
FACTORS = (4, 8, 16, 32)
"""Of the rate that was found; the later ones where it was found too low, on a machine that was busy just then."""

MEMORY_BYTES = 48 << 20
"""What a process may grow by: allocators keep some of what was free."""


class Answer(NamedTuple):
    """What a request came to: its kind, the status, the text or the header Retry-After."""

    kind: int
    status: int
    text: str


KINDS = [
    {"prompt": "Loop", "max_tokens": 30, "temperature": 0},
    {"prompt": "Loop", "max_tokens": 12, "temperature": 0, "stream": True},
    {"prompt": ["ABC", "Go"], "max_tokens": 8, "temperature": 0},
]
"""Whole, streamed, and of two prompts."""


@pytest.fixture(scope="module")
def narrow(chain_model: Path) -> Iterator[tuple[Server, psutil.Process]]:
    """Four requests at once, a short queue, few blocks; and the engine's process."""
    others = set(psutil.Process().children())
    settings = ServeConfig(max_queued_requests=QUEUE)
    made = Server(str(chain_model), settings, tokenizer="smollm2", max_num_seqs=4, num_kv_blocks=24, max_model_len=256)
    made.start()
    try:
        made.wait_ready()
        (engine,) = set(psutil.Process().children()) - others
        yield made, engine
    finally:
        made.stop()


async def ask(target: Target, kind: int) -> Answer:
    """One request on a connection of its own."""
    async with Connection(target) as connection:
        reply = await connection.post("/v1/completions", json.dumps({"model": "tiny", **KINDS[kind]}).encode())
        content = b"".join([part async for part in reply.parts]).decode()
    return Answer(kind, reply.status, text_of(content) if reply.status == 200 else content)


def text_of(content: str) -> str:
    """The text of a body or of a stream, which has ended."""
    if not content.startswith("data:"):
        return "|".join(choice["text"] for choice in json.loads(content)["choices"])
    events = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


async def at_once(target: Target, count: int, width: int) -> list[Answer]:
    """So many requests, `width` at a time."""
    places = asyncio.Semaphore(width)

    async def one(number: int) -> Answer:
        async with places:
            return await ask(target, number % len(KINDS))

    return await asyncio.gather(*map(one, range(count)))


async def at_rate(target: Target, count: int, rate: float) -> list[Answer]:
    """So many requests, as they come, however slow the server is."""
    begun = time.perf_counter()

    async def one(number: int, arrival: float) -> Answer:
        await asyncio.sleep(begun + arrival - time.perf_counter())
        return await ask(target, number % len(KINDS))

    arrivals = arrival_seconds(count, rate, "overload", poisson=True)
    return await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals)))


@pytest.mark.timeout(600)
def test_four_times_the_sustainable_rate_loses_nothing(narrow: tuple[Server, psutil.Process]) -> None:
    server, engine = narrow
    target = target_of(server.url, {})
    expected = {answer.kind: answer.text for answer in asyncio.run(at_once(target, len(KINDS), 1))}
    assert len(set(expected.values())) == len(KINDS)

    started = time.perf_counter()
    calm = asyncio.run(at_once(target, 120, 8))
    rate = len(calm) / (time.perf_counter() - started)
    assert {answer.status for answer in calm} == {200}, "nobody is sent away while the queue is short"
    server.wait_idle()
    processes = [engine, psutil.Process()]  # the other has the server and the clients
    before = [process.memory_info().rss for process in processes]

    answers: list[Answer] = []
    for factor in FACTORS:
        answers = asyncio.run(at_rate(target, COUNT, factor * rate))
        assert len(answers) == COUNT
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) <= {200, 429}, statuses
        if statuses[429] > COUNT / 4:
            break
    else:
        pytest.fail(f"at {FACTORS[-1]} times {rate:.0f} a second not all can be served: {statuses}")
    wrong = [answer for answer in answers if answer.status == 200 and answer.text != expected[answer.kind]]
    assert not wrong, wrong[:3]
    refused = {answer.text for answer in answers if answer.status == 429}
    assert {json.loads(text)["error"]["type"] for text in refused} == {"rate_limit_exceeded"}
    server.wait_idle(60.0)
    grown = [process.memory_info().rss - rss for process, rss in zip(processes, before, strict=True)]
    assert max(grown) < MEMORY_BYTES, grown
    assert asyncio.run(ask(target, 0)).text == expected[0], "and it goes on"
