"""Runs of `octavo serve` as people start it, for tests that end them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fakes.chains import FOREVER

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--tokenizer", "smollm2", "--num-threads", "1", "--max-model-len", "2048", "--num-kv-blocks", "500",
    "--served-model-name", "tiny", "--no-progress",
)  # fmt: skip
SECONDS = 60.0
"""How long anything may take on a busy machine, kernels built afresh included; what must be quick has its own limit."""

ORPHAN_SECONDS = 20.0
"""How long processes may outlive the server, on a busy machine: it takes a tenth of a second."""

QUICK_SECONDS = 20.0
"""How long an end may take that must not wait for replies, on a busy machine; drains are told to take longer."""


class Serve:
    """One run of `octavo serve`, in a session and, unless it is told one, a temporary folder of its own.

    Args:
        shell: what a shell does in place of the run itself, which is "$@" there.
    """

    def __init__(
        self, folder: Path, model: str, *flags: str, port: int = 0, tmp: Path | None = None, shell: str | None = None
    ) -> None:
        self.folder, self._log = tmp or folder / "tmp", folder / "log"
        self.folder.mkdir(exist_ok=True)
        paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-m", "octavo.core.cli.main", "serve", model, *FLAGS, "--port", str(port), *flags]
        if shell is not None:
            command = ["sh", "-c", shell, "sh", *command]
        with self._log.open("wb") as log:
            self._popen = subprocess.Popen(
                command,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": paths, "TMPDIR": str(self.folder)},
            )
        self.process = psutil.Process(self._popen.pid)
        self.engine: psutil.Process | None = None

    def log(self) -> str:
        return self._log.read_text()

    def wait_engine(self) -> psutil.Process:
        """The engine process, once it has started."""
        self.engine = wait_for(lambda: next(iter(self.process.children()), None))
        return self.engine

    def wait_ready(self) -> httpx.Client:
        """A client, once the server says where it serves."""
        line = wait_for(lambda: next((part for part in self.log().splitlines() if " on http://" in part), None))
        self.wait_engine()
        return httpx.Client(base_url=line.split()[-1], timeout=SECONDS)

    def wait_port(self) -> int:
        """Where it listens, from when it does: before the model is loaded."""

        def found() -> int | None:
            return next((each.laddr.port for each in self.process.net_connections("tcp")), None)

        return int(wait_for(found))

    def processes(self) -> list[psutil.Process]:
        """All that belong to this run and live: its session is its own."""
        return [each for each in psutil.process_iter() if self._is_ours(each)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self._popen.pid and process.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False

    def send(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self._popen.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """The exit code, after checking that nothing is left."""
        code = self._popen.wait(seconds)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while orphans := self.processes():
            assert time.monotonic() < deadline, f"orphans: {orphans}"
            time.sleep(0.02)
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := list(self.folder.iterdir()):
            assert time.monotonic() < deadline, f"left in its temporary folder: {left}"
            time.sleep(0.02)
        assert "Traceback" not in self.log(), self.log()
        return code

    def end(self) -> None:
        """Whatever the test did, leave no process."""
        self._popen.kill()
        self._popen.wait()
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return result


def stream(client: httpx.Client, **fields: Any) -> Any:
    body = {"model": "tiny", "prompt": "Loop", "stream": True, **FOREVER, **fields}
    return client.stream("POST", "/v1/completions", json=body)


def wait_queued(client: httpx.Client) -> None:
    """Wait until one request runs and another waits."""
    wait_for(lambda: _counts(client.get("/engine/state").json()) == (1, 1))


def _counts(state: dict[str, Any]) -> tuple[int, int]:
    return state["num_running"], state["num_waiting"]


def ranks_of(run: Serve) -> list[psutil.Process]:
    assert run.engine is not None
    ranks = run.engine.children()
    assert len(ranks) == 2
    return ranks


def refuses(client: httpx.Client) -> bool:
    """Whether new requests are refused, by 503 while replies are in flight, or by a closed port."""
    try:
        return httpx.get(client.base_url.join("/v1/models")).status_code == 503
    except httpx.ConnectError:
        return True
