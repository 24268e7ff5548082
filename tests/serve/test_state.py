"""GET /engine/state, over a real socket."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.core.base.config import ServeConfig
from tests.serve.conftest import Server

FIELDS = {
    "model", "max_model_len", "uptime_seconds", "num_running", "num_waiting", "steps", "generated_tokens",
    "preemptions", "prefix_query_tokens", "prefix_hit_tokens", "kv",
}  # fmt: skip


def read(server: Server) -> dict[str, Any]:
    response = server.http.get("/engine/state")
    assert response.status_code == 200, response.text
    state: dict[str, Any] = response.json()
    return state


def test_what_it_says_adds_up(server: Server) -> None:
    server.complete(list(range(1, 200)), max_tokens=4)
    server.wait_idle()
    state = read(server)
    assert set(state) == FIELDS
    assert state["model"] == "tiny"
    assert state["max_model_len"] == 2048
    assert state["uptime_seconds"] >= 0
    stats = dataclasses.asdict(server.stats())
    for name in FIELDS & set(stats):
        assert state[name] == stats[name], name
    kv = state["kv"]
    assert kv["block_size"] == 16
    assert kv["total"] == stats["kv_blocks_total"] == len(kv["cells"])
    assert kv["blocks_per_cell"] == 1
    assert kv["used"] == 0 == kv["cells"].count("u") + kv["cells"].count("s")
    assert kv["cached"] == kv["cells"].count("c") >= 12  # the 199 tokens of this prompt filled twelve blocks


def test_running_and_shared_blocks_are_seen_while_they_run(server: Server) -> None:
    before = read(server)
    prompt = list(range(300, 364))
    done = threading.Event()

    def generate() -> None:
        try:
            server.complete(prompt, max_tokens=600, n=2, ignore_eos=True)
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate)
        seen: dict[str, Any] = {}
        while not done.is_set() and "s" not in seen.get("kv", {"cells": ""})["cells"]:
            seen = read(server)
        running.result()
    assert seen["num_running"] == 2
    # Both choices hold the prompt's blocks, each its own after them.
    assert 3 <= seen["kv"]["cells"].count("s") <= 4
    assert seen["kv"]["cells"].count("u") >= 1
    assert seen["kv"]["used"] == seen["kv"]["cells"].count("s") + seen["kv"]["cells"].count("u")
    after = read(server)
    assert after["generated_tokens"] - before["generated_tokens"] == 1200
    assert after["prefix_query_tokens"] > before["prefix_query_tokens"]


def test_many_at_once_all_get_an_answer(server: Server) -> None:
    with ThreadPoolExecutor(16) as pool:
        states = list(pool.map(lambda _: read(server), range(64)))
    assert all(set(state) == FIELDS for state in states)


def test_it_costs_the_engine_no_step(server: Server) -> None:
    steps = read(server)["steps"]
    assert read(server)["steps"] == steps


@pytest.fixture
def locked(chain_model: Path) -> Any:
    made = Server(str(chain_model), ServeConfig(api_key=("secret",)), tokenizer="smollm2")
    with made:
        yield made


def test_it_stands_behind_the_key(locked: Server) -> None:
    assert locked.http.get("/engine/state").status_code == 401
    assert locked.http.get("/engine/state", headers={"authorization": "Bearer secret"}).status_code == 200


def test_it_is_503_when_the_engine_is_gone(locked: Server) -> None:
    process = locked.engine._channel._process  # type: ignore[union-attr]
    assert process is not None
    process.kill()
    deadline = time.monotonic() + 10
    while locked.engine.cause_of_end is None and time.monotonic() < deadline:
        time.sleep(0.01)
    response = locked.http.get("/engine/state", headers={"authorization": "Bearer secret"})
    assert response.status_code == 503, response.text
