"""A process of a loaded server dies, whichever, however and whenever: nothing is left, nobody waits, the cause is told.

    seed ──> Kill: who (server, engine, a rank), by which signal, while loading or under load, after how long
    load     six clients: streams, whole replies, prompts long in prefill; two requests run, the others queue

Some seeds in `make test`, 50 in `make nightly`.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from tests.fakes.chains import FOREVER
from tests.serve.processes import SECONDS, Serve, ranks_of, wait_for

SEEDS = range(50) if os.environ.get("OCTAVO_NIGHTLY") == "1" else (0, 4, 11, 15)
FLAGS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--drain-seconds", "0.5")
END_SECONDS = 20.0
"""How long a server may take to end once one of its processes is gone, on a busy machine."""

ANSWER_SECONDS = 30.0
"""How long a client waits for the next byte before we say that it hangs; nothing here takes a tenth of it."""

BODIES: list[dict[str, Any]] = [
    {"prompt": "Loop", "stream": True, **FOREVER},
    {"prompt": "Loop", "max_tokens": 200, "temperature": 0},
    {"prompt": "Loop", "stream": True, "max_tokens": 100, "n": 2},
    {"prompt": [44449] * 1900, "stream": True, "max_tokens": 20, "temperature": 0},
    {"prompt": [44449] * 1500, "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0},
    {"prompt": ["Loop", "ABC", "Go"], "max_tokens": 50, "temperature": 0},
]


class Kill(NamedTuple):
    """What happens to whom, and when.

    Attributes:
        victim: server, engine or rank; rank: which of the two.
        while_loading: else under load.
        after: seconds since the victim, or the load, began.
    """

    victim: str
    number: signal.Signals
    while_loading: bool
    after: float
    rank: int

    @property
    def is_ignored(self) -> bool:
        """Whether it is left to the server, which alone ends the others."""
        return self.number == signal.SIGTERM and self.victim != "server"


def kill_of(seed: int) -> Kill:
    """Each victim by each signal in nine seeds."""
    generator = random.Random(seed)
    victim = ("server", "engine", "rank")[seed % 3]
    number = (signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM)[seed // 3 % 3]
    return Kill(victim, number, seed % 9 != seed and generator.random() < 0.5, generator.random() * 1.5, seed // 9 % 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_process_dies(serve: Callable[..., Serve], seed: int) -> None:
    kill = kill_of(seed)
    run = serve(*FLAGS, *(("--tensor-parallel-size", "2") if kill.victim == "rank" else ()))
    run.wait_engine()
    port = run.wait_port()
    if not kill.while_loading:
        run.wait_ready().close()
    with load(f"http://127.0.0.1:{port}") as outcomes:
        victim = find(run, kill)
        time.sleep(kill.after)
        shared = shared_memory(run)
        victim.send_signal(kill.number)
        killed = time.monotonic()
        if kill.is_ignored:
            run.wait_ready().close()
            wait_for(lambda: "whole" in outcomes)
            killed = time.monotonic()
            run.send(signal.SIGTERM)
        code = run.wait(SECONDS)
        assert time.monotonic() - killed < END_SECONDS
        socket.create_server(("127.0.0.1", port)).close()  # the port is free again
    assert set(outcomes) <= {"whole", "error", "closed"}, outcomes
    assert [path for path in shared if os.path.exists(path)] == []
    check_last_words(kill, code, run.log())


def check_last_words(kill: Kill, code: int, log: str) -> None:
    """The exit code and the last line of stderr."""
    last = log.splitlines()[-1]
    if kill.number == signal.SIGTERM:
        was_loaded = " on http://" in log
        assert code == (0 if was_loaded else 130), log
        assert was_loaded or last == "octavo: ended before the model was loaded"
        assert not last.startswith("octavo: error"), log
    elif kill.victim == "server":
        assert code == -kill.number
        assert last.startswith("octavo: error: what started this engine ended without closing it")
    else:
        who = "the engine process" if kill.victim == "engine" else f"rank {kill.rank} of 2"
        assert code == 1
        assert last.startswith(f"octavo: error: {who} was killed by {kill.number.name}"), log


def find(run: Serve, kill: Kill) -> psutil.Process:
    """The victim, as soon as it lives."""
    if kill.victim == "rank":
        wait_for(lambda: run.engine is not None and len(run.engine.children()) == 2)
        return sorted(ranks_of(run), key=lambda each: each.pid)[kill.rank]
    return run.process if kill.victim == "server" else run.wait_engine()


def shared_memory(run: Serve) -> set[str]:
    """The files in shared memory that the run's processes have mapped."""
    paths: set[str] = set()
    for each in run.processes():
        paths |= {part.path for part in each.memory_maps() if part.path.startswith("/dev/shm/")}
    return paths


@contextmanager
def load(url: str) -> Iterator[list[str]]:
    """Clients that ask again and again until the server is gone; what became of each request.

    whole: it was answered; error: an error, as a status or an event; closed: the connection was cut.
    """
    outcomes: list[str] = []
    threads = [threading.Thread(target=ask, args=(url, body, outcomes), daemon=True) for body in BODIES]
    for thread in threads:
        thread.start()
    yield outcomes
    for thread in threads:
        thread.join(ANSWER_SECONDS)
        assert not thread.is_alive(), "a client hangs"


def ask(url: str, body: dict[str, Any], outcomes: list[str]) -> None:
    """One client."""
    with httpx.Client(base_url=url, timeout=ANSWER_SECONDS) as client:
        while True:
            try:
                with client.stream("POST", "/v1/completions", json={"model": "tiny", **body}) as reply:
                    outcomes.append(outcome_of(reply, is_stream="stream" in body))
            except httpx.ConnectError:
                return
            except httpx.TimeoutException:
                outcomes.append("hangs")
                return
            except httpx.TransportError:
                outcomes.append("closed")


def outcome_of(reply: httpx.Response, *, is_stream: bool) -> str:
    """What a reply came to, of which nothing was read."""
    text = reply.read().decode()
    if reply.status_code != 200:
        return "error" if '"error"' in text else f"status {reply.status_code}: {text}"
    if not is_stream:
        return "whole"
    if not text.endswith("data: [DONE]\n\n"):
        return f"a stream without its end: {text[-200:]}"
    return "error" if '{"error"' in text else "whole"
