"""Servers that start at once get ports and sockets of their own, which nobody else may enter."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.serve.processes import Serve, wait_for

NIGHTLY = os.environ.get("OCTAVO_NIGHTLY") == "1"
ROUNDS = 5 if NIGHTLY else 1
RANKS = "2" if NIGHTLY else "1"
SERVERS = 4


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_servers_that_start_at_once(serve: Callable[..., Serve], tmp_path: Path, _round: int) -> None:
    """vllm#40443, #28498, #7196. Their sockets are made in one folder, with a mask that would keep nobody out."""
    umask = os.umask(0)
    try:
        runs = [serve("--tensor-parallel-size", RANKS, tmp=tmp_path) for _ in range(SERVERS)]
    finally:
        os.umask(umask)
    modes: set[int] = set()

    def all_serve() -> bool:
        """Whether they do; the sockets' folders, which live for a moment each, are looked at meanwhile."""
        for folder in tmp_path.glob("octavo-*"):
            with suppress(FileNotFoundError):
                modes.add(stat.S_IMODE(folder.stat().st_mode))
        return all(" on http://" in run.log() for run in runs)

    wait_for(all_serve)
    assert modes == {0o700}, "one of them at least was seen"
    ports = set()
    for run in runs:
        with run.wait_ready() as client:
            ports.add(client.base_url.port)
            reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "ABC", "temperature": 0})
            assert reply.json()["choices"][0]["text"] == "DEFGH ok"
    assert len(ports) == SERVERS
    for run in runs:
        run.send(signal.SIGTERM)
    assert [run.wait() for run in runs] == [0] * SERVERS
