"""Who hears of each request that is over, as the server's settings ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.core.base.config import ServeConfig
from octavo.core.serve.metrics import access_log
from octavo.core.serve.metrics.watch import Listener


@contextmanager
def listening(settings: ServeConfig, model: str) -> Iterator[Sequence[Listener]]:
    """The listeners, until the server has ended.

    Raises:
        ConfigError: traces are asked for and can't be sent.
    """
    found: list[Listener] = [access_log.note] if settings.access_log else []
    if settings.otlp_traces_endpoint is None:
        yield found
        return
    from octavo.core.serve.metrics.tracing import Tracer  # its packages are imported only where it is asked for

    tracer = Tracer(settings.otlp_traces_endpoint, model)
    try:
        yield [*found, tracer.note]
    finally:
        tracer.close()
