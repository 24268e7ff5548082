"""What the server logs: a line for each request, as text or JSON, with times and tokens, never with content or keys."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.core.base.config import ServeConfig
from octavo.core.base.logs import JsonFormatter
from octavo.core.serve.metrics import access_log
from octavo.core.serve.metrics.watch import Exchange
from tests.fakes.chains import FOREVER
from tests.serve.conftest import Server

ROOT = Path(__file__).parents[2]
KEY = "sk-very-secret"
PROMPT = "Loop one two three four"


def broken_listener(exchange: Exchange) -> None:
    raise RuntimeError("this listener fails")


@pytest.fixture(scope="module")
def logging_server(chain_model: Path) -> Iterator[Server]:
    """With a key, the access log, and a listener that fails."""
    made = Server(str(chain_model), ServeConfig(api_key=(KEY,)), tokenizer="smollm2", max_num_seqs=4)
    made.listeners = (broken_listener, access_log.note)
    made.http.headers["authorization"] = f"Bearer {KEY}"
    with made:
        yield made


def access_fields(caplog: pytest.LogCaptureFixture, count: int = 1) -> list[dict[str, Any]]:
    """The fields of the access log's records, once there are so many."""
    deadline = time.monotonic() + 5
    while len(found := [r for r in caplog.records if r.name == "octavo.access"]) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    assert len(found) == count
    return [record.fields for record in found]  # type: ignore[attr-defined]


def test_a_completion_leaves_its_tokens_and_times(logging_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    response = logging_server.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "n": 2, "temperature": 0},
        headers={"x-request-id": "mine-1"},
    )
    usage = response.json()["usage"]
    (fields,) = access_fields(caplog)
    assert (fields["method"], fields["path"], fields["status"]) == ("POST", "/v1/completions", 200)
    assert fields["request_id"] == response.headers["x-request-id"] == "mine-1"
    assert (fields["prompt_tokens"], fields["generated_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert fields["finish_reasons"] == ["length", "length"]
    assert 0 <= fields["queue_seconds"] <= fields["first_token_seconds"] <= fields["seconds"]


def test_neither_content_nor_keys_are_logged(logging_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "octavo")
    logging_server.post("completions", prompt=PROMPT, max_tokens=4, user="somebody")
    logging_server.post("completions", prompt=[PROMPT, {"a": "hidden"}])
    logging_server.http.get("/private-path?token=hidden")
    logging_server.http.get("/v1/models", headers={"authorization": "Bearer wrong-secret"})
    assert [fields["status"] for fields in access_fields(caplog, 4)] == [200, 400, 404, 401]
    formatter = JsonFormatter()
    said = "\n".join(formatter.format(r) + r.getMessage() for r in caplog.records if r.name.startswith("octavo"))
    for secret in (KEY, "Loop", "two", "hidden", "private", "somebody", "wrong-secret"):
        assert secret not in said


def test_what_only_looks_is_for_the_level_debug(logging_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """The page alone asks /engine/state more than twice a second."""
    looks = ["/health", "/metrics", "/", "/page/main.js", "/engine/state"]
    for level, logged in ((logging.INFO, []), (logging.DEBUG, looks)):
        caplog.set_level(level, "octavo")
        assert [logging_server.http.get(path).status_code for path in looks] == [200] * 5
        logging_server.http.get("/v1/models")
        assert [fields["path"] for fields in access_fields(caplog, len(logged) + 1)] == [*logged, "/v1/models"]
        caplog.clear()


def test_a_listener_that_fails_is_logged_and_hurts_nobody(
    logging_server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "octavo")
    assert logging_server.http.get("/v1/models").status_code == 200
    access_fields(caplog)
    (failure,) = (record for record in caplog.records if record.levelno == logging.ERROR)
    line = json.loads(JsonFormatter().format(failure))
    assert line["error"] == ["RuntimeError: this listener fails"]


def test_probes_and_scrapes_are_for_debugging(logging_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert logging_server.http.get(path).status_code == 200
    assert [fields["path"] for fields in access_fields(caplog)] == ["/v1/models"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_left(logging_server: Server, caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "octavo")
    before, http = logging_server.stats().generated_tokens, logging_server.http
    body = {"model": "tiny", "prompt": "Loop", "stream": stream, "ignore_eos": True} | FOREVER
    if stream:
        with http.stream("POST", "/v1/completions", json=body):
            logging_server.wait(lambda s: s.generated_tokens > before + 3)
    else:
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=body, timeout=0.5)
    (fields,) = access_fields(caplog)
    assert fields["status"] == (200 if stream else 499)
    assert fields["finish_reasons"] == ["abort"]
    assert fields["generated_tokens"] >= 3


def test_an_error_is_logged_with_what_caused_it() -> None:
    try:
        try:
            raise ValueError("the cause")
        except ValueError as cause:
            raise RuntimeError("what came of it") from cause
    except RuntimeError:
        record = logging.LogRecord("octavo", logging.ERROR, "", 0, "%s failed", ("it",), sys.exc_info())
    line = json.loads(JsonFormatter(rank=1).format(record))
    assert line["error"] == ["RuntimeError: what came of it", "ValueError: the cause"]
    assert (line["message"], line["level"], line["rank"]) == ("it failed", "error", 1)
    assert "Traceback" in line["traceback"]


def test_every_line_of_a_server_is_json_where_that_is_asked_for(chain_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "octavo.core.cli.main", "serve", str(chain_model), "--tokenizer", "smollm2"]
    command += ["--port", "0", "--num-threads", "1", "--num-kv-blocks", "100", "--max-model-len", "512"]
    command += ["--no-progress", "--log-format", "json", "--log-level", "debug"]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with log.open("wb") as out:
        process = subprocess.Popen(command, stderr=out, env=os.environ | {"PYTHONPATH": paths})
    try:
        deadline = time.monotonic() + 60
        while " on http://" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        message = next(line["message"] for line in lines_of(log) if " on http://" in line["message"])
        url = message.split()[-1]
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 200
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    lines = lines_of(log)
    assert {line["level"] for line in lines} <= {"debug", "info", "warning"}
    asked = [line["path"] for line in lines if line["logger"] == "octavo.access"]
    assert asked == ["/health", "/v1/models"]


def lines_of(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]
