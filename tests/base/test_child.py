"""A child process: its frames, its log, and every way to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from octavo.core.base.child import ChildProcess, how_it_ended

MODULE = "tests.base.child_echo"


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess(MODULE, keeps_log=True)
    yield made
    made.kill()


def soon() -> float:
    return time.monotonic() + 20.0


def test_frames_of_any_length_come_back(child: ChildProcess) -> None:
    for data in (b"", b"x", bytes(range(256)) * 20_000):
        child.send(data, soon())
        assert child.receive(soon()) == data
    assert child.stop() == 0


def test_a_child_that_ends_is_noticed_and_its_last_line_kept(
    child: ChildProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    child.send(b"fail")
    with pytest.raises(ConnectionError):
        child.receive(soon())
    assert how_it_ended(child.stop()) == "ended with exit code 3"
    assert child.last_line == "words"
    assert capsys.readouterr().err.split() == ["ready", "the", "last", "words"]


def test_a_killed_child_is_noticed(child: ChildProcess) -> None:
    child.send(b"die")
    with pytest.raises(ConnectionError):
        child.receive()
    assert how_it_ended(child.stop()) == "was killed by SIGKILL; perhaps memory ran out"


def test_a_child_that_hangs_costs_the_deadline_and_ends_by_force(child: ChildProcess) -> None:
    child.send(b"hang")
    with pytest.raises(TimeoutError):
        child.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):  # nobody takes so much
        child.send(bytes(1 << 24), time.monotonic() + 0.05)
    began = time.monotonic()
    assert child.stop() in (1, -signal.SIGKILL)
    assert time.monotonic() - began < 10


def test_signals_without_a_name_have_their_number() -> None:
    assert how_it_ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert how_it_ended(-63) == "was killed by signal 63"


def test_signals_of_the_group_wait_for_a_child_that_begins() -> None:
    child = ChildProcess(MODULE, holds_signals=True)
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(child.pid, number)  # its interpreter has not begun
        child.send(b"x", soon())
        assert child.receive(soon()) == b"x"
    finally:
        child.kill()
