"""What KV events cost the scheduler: a step's time without them, and with them all the way into the publisher's ring.

    PYTHONPATH=src:. python tests/bench/bench_kv_events.py          one line of JSON, in microseconds a step

decode: 256 requests, a token each, 16 blocks become full a step on average. prefill: one prompt of 8,192 tokens a step,
512 blocks, for which as many are evicted. Kinds take turns step by step, so that a noisy machine hits all alike; nobody
subscribes, as the work of sockets is the publisher's thread's.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from contextlib import closing
from typing import Any

from octavo.core.base.config import EngineConfig
from octavo.core.base.params import SamplingParams
from octavo.core.engine.kv_events.publisher import Publisher
from octavo.core.engine.kv_events.stream import KVEventStream
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request
from octavo.core.sched.scheduler import Scheduler
from tests.bench.bench_scheduler import step

BLOCK_SIZE = 16
PROMPT_TOKENS = 8192
NUM_RUNNING = 256


def scheduler_of(num_blocks: int, max_num_seqs: int, stream: KVEventStream | None) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=16384, max_model_len=65536, admission_headroom=0.0
    )
    recorder = None if stream is None else stream.recorder
    blocks = BlockManager(num_blocks, [KVGroupSpec(0, BLOCK_SIZE, None, 1)], kv_dtype="float32", observer=recorder)
    return Scheduler(limits, blocks)


def decoding(stream: KVEventStream | None) -> Scheduler:
    """Requests whose blocks become full at different steps."""
    scheduler = scheduler_of(65536, NUM_RUNNING, stream)
    for i in range(NUM_RUNNING):
        prompt = [i + j for j in range(40 + i % BLOCK_SIZE)]
        scheduler.add(Request(f"r{i}", prompt, SamplingParams(max_tokens=None), cache_salt=str(i)))
    step(scheduler)
    return scheduler


def timed(scheduler: Scheduler, stream: KVEventStream | None) -> float:
    """Microseconds of a step and of what its events cost."""
    spent = step(scheduler)
    began = time.perf_counter_ns()
    if stream is not None:
        stream.flush()
    return (spent + time.perf_counter_ns() - began) / 1e3


def measure(steps: int = 960) -> dict[str, Any]:
    """Mean and median of both kinds of steps, off and on."""
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model="m", kv_events_endpoint=f"ipc://{folder}/events")
        with closing(Publisher(config)) as publisher:
            stream = KVEventStream(publisher, str)
            streams = {"off": None, "on": stream}
            times: dict[str, list[float]] = {f"{kind}_{name}": [] for kind in ("decode", "prefill") for name in streams}
            decodes = {name: decoding(given) for name, given in streams.items()}
            prefills = {name: scheduler_of(2048, 1, given) for name, given in streams.items()}
            stream.flush()
            for _ in range(steps):
                for name, given in streams.items():
                    times[f"decode_{name}"].append(timed(decodes[name], given))
            for i in range(steps // 8):
                for name, given in streams.items():
                    prompt = [(i * 7919 + j) % 50_000 for j in range(PROMPT_TOKENS)]
                    prefills[name].add(Request(f"p{i}", prompt, SamplingParams(max_tokens=1)))
                    times[f"prefill_{name}"].append(timed(prefills[name], given))
    return {
        name: {"mean": round(statistics.mean(each), 1), "median": round(statistics.median(each), 1)}
        for name, each in times.items()
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
