"""The lines of OpenAI's batch files: requests come in, answers and errors go out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {…}}
        ──► Job       ──► {"id", "custom_id": "a", "response": {"status_code", "request_id", "body"}, "error": null}
        ──► BadLine   ──► {"id", "custom_id": "a" or null, "response": null, "error": {"code", "message"}}

A request that the server refuses is answered like any other, with its status; `error` is for lines that are no request.
One line is in memory at a time, and of the lines before it eight bytes each.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from typing import Any, BinaryIO, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

MAX_ID_CHARS = 512

URLS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/classify",
    "/v1/score", "/v1/rerank",
)  # fmt: skip
"""Those of the server's paths that answer a request by itself."""


class Job(NamedTuple):
    """A request: the body is JSON. Lines count from 1."""

    line: int
    custom_id: str
    url: str
    body: bytes


class BadLine(NamedTuple):
    """What is no request, and why."""

    line: int
    custom_id: str | None
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_jobs(
    file: BinaryIO, urls: Collection[str], max_line_bytes: int, done: Collection[int] = ()
) -> Iterator[Job | BadLine]:
    """Every line of a file but empty ones and those done before.

    Args:
        urls: that may be asked.
        max_line_bytes: a longer line is a bad one.
        done: fingerprints of the custom_ids that an earlier run has answered.
    """
    seen: set[int] = set()
    for number, text in _lines(file, max_line_bytes):
        if text is None:
            yield BadLine(number, None, "line_too_long", f"line {number} has more than {max_line_bytes} bytes")
            continue
        job = _read(number, text, urls)
        if job.custom_id is not None:
            mark = fingerprint(job.custom_id)
            if mark in seen:
                job = BadLine(number, job.custom_id, "duplicate_custom_id", f"line {number}: its custom_id came before")
            seen.add(mark)
            if isinstance(job, Job) and mark in done:
                continue
        yield job


def fingerprint(custom_id: str) -> int:
    """Eight bytes that stand for a custom_id."""
    return xxh3_64_intdigest(custom_id.encode("utf-8", "surrogatepass"))


def answer_line(job: Job, status: int, request_id: str, body: bytes) -> bytes:
    """The line of output for a request that was answered, whatever the status. `body` is JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encode(job.custom_id, response, None)


def error_line(bad: BadLine) -> bytes:
    """The line of output for what is no request."""
    return _encode(bad.custom_id, None, {"code": bad.code, "message": bad.message})


def _encode(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Each line that is not empty with its number; None for one that is too long, which is passed over unread."""
    number = 0
    while text := file.readline(max_bytes + 1):
        number += 1
        if len(text) > max_bytes and not text.endswith(b"\n"):
            while text and not text.endswith(b"\n"):
                text = file.readline(max_bytes)
            yield number, None
        elif text.strip():
            yield number, text


def _read(number: int, text: bytes, urls: Collection[str]) -> Job | BadLine:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.ValidationError as error:
        return BadLine(number, _id_of(text), "invalid_request", f"line {number}: {error}")
    except (msgspec.DecodeError, RecursionError) as error:
        return BadLine(number, None, "invalid_json", f"line {number} is not JSON: {error}")
    if len(line.custom_id) > MAX_ID_CHARS:
        return BadLine(number, None, "invalid_request", f"line {number}: custom_id has over {MAX_ID_CHARS} characters")

    def bad(code: str, message: str) -> BadLine:
        return BadLine(number, line.custom_id, code, f"line {number}: {message}")

    if line.method != "POST":
        return bad("invalid_request", "method must be POST")
    if line.url not in urls:
        return bad("unknown_url", f"url must be one of {', '.join(urls)}")
    if line.body.get("stream"):
        return bad("invalid_request", "stream is for connections; leave it out")
    return Job(number, line.custom_id, line.url, msgspec.json.encode(line.body))


def _id_of(text: bytes) -> str | None:
    """The custom_id of a line that is wrong elsewhere."""
    try:
        found = msgspec.json.decode(text)["custom_id"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and len(found) <= MAX_ID_CHARS else None
