"""schemathesis over the whole OpenAPI document: nothing fails, and every answer is as the document says.

Some hundreds of requests; 10,000 with OCTAVO_NIGHTLY=1 (`make nightly JOBS=openapi`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from octavo.core.base.config import ServeConfig
from octavo.core.base.params import MAX_N
from tests.serve.conftest import Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
IS_NIGHTLY = bool(os.environ.get("OCTAVO_NIGHTLY"))
NUM_REQUESTS = 10_000 if IS_NIGHTLY else 400


@pytest.fixture(scope="module")
def short(chain_model: Path) -> Iterator[Server]:
    """A server whose context is so short that no request takes long."""
    made = Server(str(chain_model), ServeConfig(allow_lora_updates=True), tokenizer="smollm2", max_model_len=64)
    made.start()
    try:
        made.wait_ready()
        yield made
        made.wait_idle()
    finally:
        made.stop()


def operations(server: Server) -> list[Any]:
    config = SchemathesisConfig()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", config=config)
    return [result.ok() for result in schema.get_all_operations()]


def tame(body: dict[str, Any]) -> None:
    """Let a body in at all, and keep its work short."""
    if "model" in body:
        body["model"] = "tiny"  # else nearly all would be turned away at once
    for name in ("n", "best_of"):
        if isinstance(body.get(name), int) and 4 < body[name] <= MAX_N:
            body[name] = 4


def test_every_operation_does_as_the_document_says(short: Server) -> None:
    found = operations(short)
    with_body = [each for each in found if each.method == "post"]
    share = NUM_REQUESTS // len(with_body) + 1
    statuses: Counter[int] = Counter()

    for operation in found:

        @hypothesis.settings(
            max_examples=share if operation in with_body else 5,
            deadline=None,
            derandomize=not IS_NIGHTLY,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
            database=None,
        )
        @hypothesis.given(case=operation.as_strategy())
        def holds(case: Any) -> None:
            if isinstance(case.body, dict):
                tame(case.body)
            response = case.call(timeout=120)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=CHECKS)

        holds()
    assert statuses.total() >= NUM_REQUESTS
    assert statuses[200] > 20
    assert statuses[400] > 20


def test_the_document_names_every_error(short: Server) -> None:
    document = short.http.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert {"200", "401", "404", "500", "503"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"]
    assert "text/event-stream" in document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]


def test_the_page_loads_nothing_from_elsewhere(short: Server) -> None:
    page = short.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "POST /v1/chat/completions" in page.text
    assert "prompt_logprobs" in page.text
    assert "//" not in page.text.replace("<!doctype html>", "")
    assert "<script" not in page.text
