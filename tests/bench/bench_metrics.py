"""What a scrape costs, and what measuring costs a token.

    PYTHONPATH=src python tests/bench/bench_metrics.py      one line of JSON

scrape_ms: the text of /metrics with every metric under all its names, 64 live requests with adapters and ten thousand
that have ended. token_us: what the observer takes for each token of a stream, the
making of what it is told included.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from octavo.core.base.config import EngineConfig
from octavo.core.base.metrics import SchedulerCounters
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.observer import Observer
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.engine.wire import EngineRequest, StepFacts
from octavo.core.serve.metrics.catalogue import METRICS, Moment
from octavo.core.serve.metrics.text import Exposition

ENDED, LIVE, TOKENS = 10_000, 64, 8


def run_request(observer: Observer, name: str, *, ends: bool) -> None:
    """Tell of a request with TOKENS tokens."""
    request = EngineRequest(
        request_id=name, prompt_token_ids=[1] * 100, params=SamplingParams(), adapter=f"a{hash(name) % 8}"
    )
    observer.submitted(request, time.monotonic(), None)
    step = StepFacts(began=time.monotonic(), num_tokens=100, started=[(name, 0)], preempted=[])
    observer.stepped(step)
    for index in range(TOKENS):
        reason = FinishReason.STOP if ends and index == TOKENS - 1 else None
        gained = CompletionOutput(index=0, token_ids=[7], finish_reason=reason)
        piece = RequestOutput(name, None, request.prompt_token_ids, [gained], finished=reason is not None)
        observer.took([piece], time.monotonic())


def median_ms(work: Callable[[], object], repeats: int = 200) -> float:
    """Of one call."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds) * 1e3, 3)


def main() -> None:
    """Measure and print."""
    observer = Observer()
    started = time.perf_counter()
    for index in range(ENDED):
        run_request(observer, str(index), ends=True)
    token_us = (time.perf_counter() - started) / ENDED / TOKENS * 1e6
    for index in range(LIVE):
        run_request(observer, f"live-{index}", ends=False)
    gauges = {"num_running": 64, "num_waiting": 0, "num_gated": 0, "kv_blocks_total": 1000}
    stats = SchedulerCounters().stats(**gauges, kv_blocks_used=500, kv_blocks_cached=100)
    http = {(f"/v1/{index}", str(status)): 7 for index in range(10) for status in (200, 400, 429, 499, 500)}
    config = EngineConfig(model="m", enable_lora=True)
    moment = Moment(observer, stats, config, http, "0", 0)
    exposition = Exposition(METRICS, {"model_name": "m", "engine": "0"}, aliases=True)
    figures = {
        "scrape_ms": median_ms(lambda: exposition.write(moment)),
        "lines": exposition.write(moment).count(b"\n"),
        "token_us": round(token_us, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
