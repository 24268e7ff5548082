"""Spans over OTLP: what a collector gets, and that a collector in trouble costs requests nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from octavo.core.base.config import ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.serve.metrics.listeners import listening
from tests.serve.conftest import Server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes spans over HTTP."""

    def __init__(self, status: int = 200) -> None:
        self.spans: list[Any] = []
        self.asked = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.asked += 1
                if status == 200:
                    message = ExportTraceServiceRequest.FromString(body)
                    for resource in message.resource_spans:
                        for scope in resource.scope_spans:
                            collector.spans += scope.spans
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._web.server_port}/v1/traces"
        threading.Thread(target=self._web.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._web.shutdown()
        self._web.server_close()


@contextmanager
def tracing_server(model: Path, url: str) -> Iterator[Server]:
    """A server that sends its spans there; they are there afterwards."""
    settings = ServeConfig(otlp_traces_endpoint=url, access_log=False)
    with listening(settings, "tiny") as listeners:
        made = Server(str(model), settings, tokenizer="smollm2")
        made.listeners = listeners
        with made:
            yield made


def attributes_of(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_what_a_collector_gets(chain_model: Path) -> None:
    collector = Collector()
    began = time.time_ns()
    with tracing_server(chain_model, collector.url) as server:
        body = {"model": "tiny", "prompt": "Loop one two", "max_tokens": 4, "temperature": 0}
        for sampled in ("01", "00"):
            parent = f"00-{TRACE}-{PARENT}-{sampled}"
            response = server.http.post("/v1/completions", json=body, headers={"traceparent": parent})
        usage = response.json()["usage"]
        server.http.post("/v1/completions", json={"model": "none", "prompt": "x"}, headers={"traceparent": "nonsense"})
        for path in ("/health", "/metrics", "/nothing"):
            server.http.get(path)
    collector.close()
    span, refused = collector.spans  # the one that its caller did not sample is not there
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "POST /v1/completions"
    assert began < span.start_time_unix_nano < span.end_time_unix_nano < time.time_ns()
    told = attributes_of(span)
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.response.model"] == "tiny"
    assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < told["gen_ai.latency.time_to_first_token"] < told["gen_ai.latency.e2e"]
    assert "Loop" not in str(span)
    assert refused.parent_span_id == b""
    assert refused.trace_id.hex() != TRACE
    assert attributes_of(refused)["http.response.status_code"] == 404


@pytest.mark.parametrize("trouble", ["gone", "failing"])
def test_a_collector_in_trouble_costs_nothing(chain_model: Path, trouble: str) -> None:
    collector = Collector(status=503)
    if trouble == "gone":
        collector.close()
    with tracing_server(chain_model, collector.url) as server:
        for _ in range(3):
            assert server.complete("Loop", max_tokens=3, temperature=0).usage.completion_tokens == 3
        ending = time.monotonic()
    assert time.monotonic() - ending < 10
    if trouble == "failing":
        assert collector.asked
        collector.close()


def test_a_wrong_endpoint_is_told_at_once() -> None:
    with (
        pytest.raises(ConfigError, match="http://localhost:4318/v1/traces"),
        listening(ServeConfig(otlp_traces_endpoint="localhost:4317"), "tiny"),
    ):
        pass


def test_nothing_is_imported_unless_asked_for() -> None:
    """FastAPI imports OpenTelemetry's API where it is installed; the SDK and the exporter are what costs."""
    code = (
        "import sys; from octavo.core.base.config import ServeConfig; import octavo.core.serve.api\n"
        "from octavo.core.serve.metrics.listeners import listening\n"
        "with listening(ServeConfig(), 'm') as listeners: assert len(listeners) == 1\n"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
