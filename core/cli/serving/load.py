"""Puts a load on a server: who is sent when, how many at once, and what that cost the client itself.

    arrivals ──► wait for a place (max_concurrency) ──► Prober.send ──► Sample
                    │ waited                                              ticker: how late the event loop is

Requests arrive when they are due, however slow the server is; where they must wait for a place, the wait is reported
beside the latencies and is in none of them.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from octavo.core.cli.serving.probe import Prober, Sample
from octavo.core.cli.serving.requests import Ask

TICK_SECONDS = 0.01


@dataclass(slots=True)
class Client:
    """What measuring cost.

    Attributes:
        cpu_seconds: of this process.
        lags: by how many seconds each tick of the event loop came late, as every event may have.
        lates: by how many seconds after its time each request set out, for reasons of the client.
        waits: how many seconds each then waited for a place.
    """

    cpu_seconds: float = 0.0
    lags: list[float] = field(default_factory=list)
    lates: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All samples of one load, the seconds from the first arrival to the last end, and the client's own cost."""

    samples: Sequence[Sample]
    seconds: float
    client: Client


async def put_load(
    prober: Prober, asks: Sequence[Ask], arrivals: Sequence[float], max_concurrency: int | None
) -> Outcome:
    """Send every request at its time.

    Args:
        arrivals: seconds after the start, one for each request.
        max_concurrency: requests in flight at most; None: no limit.
    """
    places = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    client, begun = Client(), time.perf_counter()
    ticker = asyncio.create_task(_tick(client.lags))
    cpu_before = time.process_time()

    async def one(ask: Ask, arrival: float) -> Sample:
        await asyncio.sleep(begun + arrival - time.perf_counter())
        due = time.perf_counter()
        client.lates.append(max(0.0, due - begun - arrival))
        async with places:
            client.waits.append(time.perf_counter() - due)
            return await prober.send(ask)

    try:
        samples = await asyncio.gather(*map(one, asks, arrivals))
    finally:
        ticker.cancel()
    client.cpu_seconds = time.process_time() - cpu_before
    return Outcome(samples, max(sample.ended for sample in samples) - begun, client)


def allow_connections() -> None:
    """As many open connections as this machine lets a process have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _tick(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))
