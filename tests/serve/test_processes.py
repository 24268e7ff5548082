"""`octavo serve` as people run it: two processes, and every way in which they may end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.processes import QUICK_SECONDS, SECONDS, Serve, ranks_of, refuses, stream, wait_for, wait_queued


def test_a_taken_port_and_an_idle_end(serve: Callable[..., Serve]) -> None:
    first = serve("--tool-call-parser", "hermes", "--drain-seconds", "60")
    client = first.wait_ready()
    assert "octavo: calls of tools are read as hermes, reasoning is left in the text\n" in first.log()
    assert client.get("/health").status_code == 200
    second = serve(port=client.base_url.port)
    assert second.wait() == 2
    assert second.log().startswith(f"octavo: error: cannot listen on 127.0.0.1:{client.base_url.port}")
    assert second.log().count("\n") == 1
    asked = time.monotonic()
    first.send(signal.SIGTERM)
    assert first.wait() == 0
    assert time.monotonic() - asked < QUICK_SECONDS
    with socket.create_server(("127.0.0.1", client.base_url.port or 0)):
        pass  # the port is free again


def test_two_servers_that_want_one_port_at_once(serve: Callable[..., Serve]) -> None:
    """vllm#40443: the port is taken before the model is loaded, so the second one does not load for nothing."""
    first = serve()
    first.wait_engine()
    port = first.wait_port()
    second = serve(port=port)
    assert second.wait() == 2
    assert second.engine is None


@pytest.mark.parametrize(
    ("flags", "model", "says"),
    [
        ((), "/no/such/model", "no file or directory"),
        ((), "smollm3", "did you mean 'smollm2'?"),
        (("--num-kv-blocks", "1"), None, "one token needs 2"),
        (("--host", "256.0.0.1"), None, "cannot listen on 256.0.0.1:0"),
    ],
)
def test_what_can_not_be_served_is_told_in_one_line(
    serve: Callable[..., Serve], flags: tuple[str, ...], model: str | None, says: str
) -> None:
    run = serve(*flags, model=model)
    assert run.wait() == 2
    last = run.log().splitlines()[-1]
    assert last.startswith("octavo: error: ")
    assert says in last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(serve: Callable[..., Serve], number: int) -> None:
    run = serve()
    run.wait_engine()
    run.send(number, group=number == signal.SIGINT)
    assert run.wait() == 130
    assert run.log().splitlines()[-1] == "octavo: ended before the model was loaded"


def test_signals_leave_the_engine_to_the_server(serve: Callable[..., Serve]) -> None:
    """From its first instruction on, when its interpreter could not ignore them yet."""
    run = serve()
    engine = run.wait_engine()
    while " on http://" not in run.log():
        for number in (signal.SIGINT, signal.SIGTERM):
            engine.send_signal(number)  # raises where it has ended
        time.sleep(0.01)
    with run.wait_ready() as client:
        assert client.get("/health").status_code == 200
    run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_the_server_killed_while_loading(serve: Callable[..., Serve]) -> None:
    run = serve()
    run.wait_engine()
    run.send(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    assert "what started this engine ended without closing it" in run.log().splitlines()[-1]


def test_both_killed_at_once_while_loading(serve: Callable[..., Serve]) -> None:
    """Nobody is left to tidy up: the sockets' folder has to be gone before the model is loaded."""
    run = serve()
    run.wait_engine()
    wait_for(lambda: list(run.folder.iterdir()))
    wait_for(lambda: not list(run.folder.iterdir()))
    assert " on http://" not in run.log(), "the folder stayed until the model was loaded"
    run.send(signal.SIGKILL, group=True)
    assert run.wait() == -signal.SIGKILL


def test_a_terminal_that_closes_ends_the_server_in_order(serve: Callable[..., Serve]) -> None:
    """SIGHUP goes to the whole group."""
    run = serve("--drain-seconds", "60")
    with run.wait_ready() as client, stream(client, max_tokens=300) as live:
        events = live.iter_lines()
        next(events)
        run.send(signal.SIGHUP, group=True)
        *_, last, done = [event for event in events if event]
        assert '"finish_reason":"length"' in last
        assert done == "data: [DONE]"
    assert run.wait() == 0


def test_under_nohup_the_server_outlives_its_terminal(serve: Callable[..., Serve]) -> None:
    run = serve(shell="trap '' HUP; exec \"$@\"")
    with run.wait_ready() as client:
        run.send(signal.SIGHUP, group=True)
        reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "ABC", "temperature": 0})
        assert reply.json()["choices"][0]["text"] == "DEFGH ok"
    run.send(signal.SIGTERM)
    assert run.wait() == 0


@pytest.mark.parametrize(
    ("streams", "form"),
    [("<&- >&- 2>&-", "text"), ("2>&-", "json"), ("2>/dev/full", "text"), ("2>{pipe}", "text"), ("2>{pipe}", "json")],
)
def test_nobody_need_read_what_the_server_says(
    serve: Callable[..., Serve], tmp_path: Path, streams: str, form: str
) -> None:
    """Its streams are closed, the log's disk is full, or its reader has gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = serve("--log-format", form, shell=f'exec "$@" {streams.format(pipe=pipe)}')
    run.wait_engine()
    os.close(reader)
    with httpx.Client(base_url=f"http://127.0.0.1:{run.wait_port()}", timeout=SECONDS) as client:
        reply = client.post("/v1/completions", json={"model": "tiny", "prompt": "ABC", "temperature": 0})
        assert reply.json()["choices"][0]["text"] == "DEFGH ok"
    run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_more_clients_than_files_may_be_open(serve: Callable[..., Serve]) -> None:
    """A soft limit is raised; at the hard one the server turns connections away, and goes on when they have gone."""
    raised = serve(shell='ulimit -Sn 64; exec "$@"')
    raised.wait_engine()
    soft, hard = raised.process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard > 64
    raised.end()
    run = serve(shell='ulimit -n 64; exec "$@"')
    with run.wait_ready() as client:
        address = "127.0.0.1", client.base_url.port or 0
        with ExitStack() as crowd:
            for _ in range(100):
                crowd.enter_context(suppress(OSError))
                crowd.enter_context(socket.create_connection(address, timeout=SECONDS))
            wait_for(lambda: run.process.num_fds() >= 63)
        wait_for(lambda: run.process.num_fds() < 50)
        assert httpx.get(client.base_url.join("/health"), timeout=SECONDS).status_code == 200
    run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_a_working_directory_that_can_not_be_written(serve: Callable[..., Serve]) -> None:
    run = serve(shell='cd /proc/self; exec "$@"')
    run.wait_ready().close()
    run.send(signal.SIGTERM)
    assert run.wait() == 0


def test_the_engine_killed(serve: Callable[..., Serve]) -> None:
    run = serve("--drain-seconds", "60")
    with run.wait_ready() as client, stream(client) as live:
        events = live.iter_lines()
        assert "one" in next(events)
        assert run.engine is not None
        run.engine.kill()
        killed = time.monotonic()
        *_, error, done = [event for event in events if event]
        assert "killed by SIGKILL" in error
        assert error.startswith('data: {"error":')
        assert done == "data: [DONE]"
    assert run.wait() == 1
    assert time.monotonic() - killed < QUICK_SECONDS
    assert run.log().splitlines()[-1].startswith("octavo: error: the engine process was killed by SIGKILL")


def test_the_server_killed(serve: Callable[..., Serve]) -> None:
    run = serve()
    with run.wait_ready() as client, stream(client) as live:
        next(live.iter_lines())
        run.send(signal.SIGKILL)
        killed = time.monotonic()
        assert run.wait() == -signal.SIGKILL
    assert time.monotonic() - killed < QUICK_SECONDS


def test_a_signal_lets_replies_finish(serve: Callable[..., Serve]) -> None:
    """vllm#36666. The signal goes to both processes, as a service manager sends it."""
    run = serve("--drain-seconds", "60")
    with run.wait_ready() as client, stream(client, max_tokens=300) as live:
        events = live.iter_lines()
        next(events)
        run.send(signal.SIGTERM, group=True)
        wait_for(lambda: refuses(client))
        *_, last, done = [event for event in events if event]
        assert '"finish_reason":"length"' in last
        assert done == "data: [DONE]"
    assert run.wait() == 0


def queued_reply(url: httpx.URL, **fields: Any) -> tuple[int, str]:
    """Status and text of a reply to a request that has to wait."""
    with httpx.Client(base_url=url, timeout=SECONDS) as client, stream(client, **fields) as reply:
        return reply.status_code, reply.read().decode()


def test_draining_lets_the_queue_finish_too(serve: Callable[..., Serve]) -> None:
    """vllm#36666: one stream runs, one waits."""
    run = serve("--max-num-seqs", "1", "--drain-seconds", "60")
    with run.wait_ready() as client, ThreadPoolExecutor(1) as thread:
        with stream(client, max_tokens=1000) as live:
            events = live.iter_lines()
            next(events)
            queued = thread.submit(queued_reply, client.base_url, max_tokens=20)
            wait_queued(client)
            run.send(signal.SIGTERM)
            wait_for(lambda: refuses(client))
            assert [event for event in events if event][-1] == "data: [DONE]"
        status, text = queued.result(SECONDS)
        assert status == 200
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
    assert run.wait() == 0


@pytest.mark.parametrize(("drain_seconds", "signals"), [("0", 1), ("60", 2)])
def test_what_may_not_finish_ends_properly(serve: Callable[..., Serve], drain_seconds: str, signals: int) -> None:
    """vllm#36666: what runs ends with an error event, what waits with an error status, and nothing takes time."""
    run = serve("--max-num-seqs", "1", "--drain-seconds", drain_seconds)
    with run.wait_ready() as client, ThreadPoolExecutor(1) as thread:
        with stream(client) as live:
            events = live.iter_lines()
            next(events)
            queued = thread.submit(queued_reply, client.base_url)
            wait_queued(client)
            asked = time.monotonic()
            run.send(signal.SIGTERM)
            if signals == 2:
                wait_for(lambda: refuses(client))
                run.send(signal.SIGTERM)
            *_, error, done = [event for event in events if event]
        assert error.startswith('data: {"error":')
        assert done == "data: [DONE]"
        status, text = queued.result(SECONDS)
        assert (status, "error" in json.loads(text)) == (503, True)
    assert run.wait() == 0
    assert time.monotonic() - asked < QUICK_SECONDS
    assert "octavo: error" not in run.log()


def test_further_signals_change_nothing(serve: Callable[..., Serve]) -> None:
    """Up to the process's last instruction."""
    run = serve()
    run.wait_ready().close()
    while run.process.is_running() and run.process.status() != psutil.STATUS_ZOMBIE:
        run.send(signal.SIGTERM)
        time.sleep(0.002)
    assert run.wait() == 0


def test_a_second_signal_ends_replies(serve: Callable[..., Serve]) -> None:
    run = serve("--drain-seconds", "60")
    with run.wait_ready() as client, stream(client) as live, stream(client, prompt=["Loop"] * 300) as unread:
        events = live.iter_lines()
        next(events)
        run.send(signal.SIGINT, group=True)
        wait_for(lambda: refuses(client))
        next(events)
        run.send(signal.SIGINT, group=True)
        asked = time.monotonic()
        *_, error, done = [event for event in events if event]
        assert "the engine was closed" in error
        assert done == "data: [DONE]"
        assert run.wait() == 0
        assert time.monotonic() - asked < QUICK_SECONDS
        assert unread.status_code == 200


def test_a_rank_killed(serve: Callable[..., Serve]) -> None:
    run = serve("--tensor-parallel-size", "2", "--drain-seconds", "60")
    with run.wait_ready() as client, stream(client) as live:
        events = live.iter_lines()
        assert "one" in next(events)
        ranks = ranks_of(run)
        ranks[1].kill()
        killed = time.monotonic()
        *_, error, done = [event for event in events if event]
        assert "rank 1 of 2 was killed by SIGKILL" in error
        assert done == "data: [DONE]"
    assert run.wait() == 1
    assert time.monotonic() - killed < QUICK_SECONDS
    assert run.log().splitlines()[-1].startswith("octavo: error: rank 1 of 2 was killed by SIGKILL")
    assert psutil.wait_procs(ranks, timeout=QUICK_SECONDS)[1] == []


def test_ranks_finish_replies_too_and_end_with_the_server(serve: Callable[..., Serve]) -> None:
    """The signal goes to the whole group: ranks leave it to the server."""
    run = serve("--tensor-parallel-size", "2", "--drain-seconds", "60")
    with run.wait_ready() as client, stream(client, max_tokens=300) as live:
        events = live.iter_lines()
        next(events)
        ranks = ranks_of(run)
        run.send(signal.SIGTERM, group=True)
        *_, last, done = [event for event in events if event]
        assert '"finish_reason":"length"' in last
        assert done == "data: [DONE]"
    assert run.wait() == 0
    assert psutil.wait_procs(ranks, timeout=QUICK_SECONDS)[1] == []
