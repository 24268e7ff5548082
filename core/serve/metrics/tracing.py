"""A span for each request, sent to a collector as OTLP over HTTP: the extra `tracing`.

    traceparent of the request ──► parent          no traceparent: a trace of its own
    Exchange                   ──► one span, made when the request is over, with the times it had
    a thread of its own        ──► collector       spans wait in a queue of 2,048; when it is full they are dropped

A collector that is slow, wrong or gone costs requests nothing; what the exporter has to say about it is logged.
Attributes are those of OpenTelemetry's conventions for HTTP and generative AI; the times in the engine have no
convention, and are named as vLLM names them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from octavo import __version__
from octavo.core.base.errors import ConfigError
from octavo.core.serve.metrics.watch import OTHER, Exchange

CLOSE_SECONDS = 2.0
"""How long the last spans may take to leave when the server ends."""

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
}
"""Route -> what the conventions call it."""

TIMES = {
    "queue_seconds": "time_in_queue",
    "first_token_seconds": "time_to_first_token",
    "prefill_seconds": "time_in_model_prefill",
    "decode_seconds": "time_in_model_decode",
    "seconds": "e2e",
}


class Tracer:
    """Sends spans. Its owner closes it.

    Args:
        endpoint: URL of the collector's traces, such as http://localhost:4318/v1/traces.
        model: the served name.

    Raises:
        ConfigError: the extra is missing, or the endpoint is no URL.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "otlp_traces_endpoint is no URL; give one such as http://localhost:4318/v1/traces",
                field="otlp_traces_endpoint",
            )
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                "otlp_traces_endpoint needs an extra; pip install 'octavo[serve,tracing]'", field="otlp_traces_endpoint"
            ) from error
        resource = Resource.create({"service.name": "octavo", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("octavo", __version__)
        self._read_parent = TraceContextTextMapPropagator().extract
        self._kind, self._error = SpanKind.SERVER, StatusCode.ERROR
        self._model = model

    def note(self, exchange: Exchange) -> None:
        """Make a request's span; those that only look, and strangers' paths, have none."""
        if exchange.only_looks or exchange.path == OTHER:
            return
        span = self._tracer.start_span(
            f"{exchange.method} {exchange.path}",
            context=self._read_parent({name: exchange.headers.get(name, "") for name in ("traceparent", "tracestate")}),
            kind=self._kind,
            attributes=dict(_attributes(exchange, self._model)),
            start_time=exchange.began_ns,
        )
        if exchange.status >= 500:
            span.set_status(self._error)
        span.end(exchange.ended_ns)

    def close(self) -> None:
        """Send what waits, if the collector takes it in time."""
        # Shutdown may wait for a collector that does not answer; the thread then ends with the process.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _attributes(exchange: Exchange, model: str) -> Iterator[tuple[str, Any]]:
    yield "http.request.method", exchange.method
    yield "http.route", exchange.path
    yield "http.response.status_code", exchange.status
    yield "octavo.request_id", exchange.request_id
    if exchange.path in OPERATIONS:
        yield "gen_ai.operation.name", OPERATIONS[exchange.path]
        yield "gen_ai.provider.name", "octavo"
    ends = exchange.report.ends
    if not ends:
        return
    yield "gen_ai.response.model", exchange.report.adapter or model
    yield "gen_ai.usage.input_tokens", exchange.report.prompt_tokens
    yield "gen_ai.usage.output_tokens", sum(end.generated_tokens for end in ends)
    yield "gen_ai.usage.cache_read.input_tokens", max(end.cached_tokens for end in ends)
    yield "gen_ai.response.finish_reasons", [end.reason.value for end in ends]
    for name, spelled in TIMES.items():
        if known := [seconds for end in ends if (seconds := getattr(end, name)) is not None]:
            yield f"gen_ai.latency.{spelled}", max(known)
