"""How long a call takes on a device: queued back to back, for long enough to be measured, the median of several."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from octavo.core.backend.device import DeviceBackend

MEASURE_S = 0.05
"""Least time of a measurement: long beside the clock and the queue."""

REPEATS = 5


def seconds_of(backend: DeviceBackend, call: Callable[[], object]) -> float:
    """Seconds of one call."""
    call()
    backend.synchronize()
    count = 1
    while (spent := _timed(backend, call, count)) < MEASURE_S and count < 1 << 16:
        count = max(count * 2, int(count * MEASURE_S / max(spent, 1e-9)))
    return statistics.median(_timed(backend, call, count) for _ in range(REPEATS)) / count


def _timed(backend: DeviceBackend, call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    backend.synchronize()
    return time.perf_counter() - started
