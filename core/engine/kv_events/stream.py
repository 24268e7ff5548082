"""KV events of one engine: what its cache tells in a step becomes one batch."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from octavo.core.base.config import EngineConfig
from octavo.core.engine.kv_events.events import EventBatch, EventRecorder
from octavo.core.engine.kv_events.publisher import Publisher

RANK = 0
"""There is one engine, however many devices its model is split over."""


class KVEventStream:
    """From the cache to the sockets. Used by the engine's thread alone.

    Args:
        publisher: open; the stream closes it.
        adapter_name: as in EventRecorder.

    Attributes:
        recorder: the cache's observer.
    """

    def __init__(self, publisher: Publisher, adapter_name: Callable[[str], str]) -> None:
        self.recorder = EventRecorder(adapter_name)
        self._publisher = publisher
        self._encode = msgspec.msgpack.Encoder().encode

    def flush(self) -> None:
        """Publish what changed since the last time, if anything did."""
        if events := self.recorder.take():
            self._publisher.put(self._encode(EventBatch(time.time(), events, RANK)))

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        self._publisher.close()


def open_publisher(config: EngineConfig) -> Publisher | None:
    """The publisher that a config asks for, before anything heavy is loaded. Raises ConfigError."""
    return None if config.kv_events_endpoint is None else Publisher(config)
