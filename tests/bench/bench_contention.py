"""How a step slows when other processes want the cores: in proportion, or by collapsing at its barriers?

    PYTHONPATH=src python tests/bench/bench_contention.py [--threads 2] [--busy 0 1 2] [--steps 40]

A step is SmolLM2-135M's products for `--rows` tokens over 30 layers: 120 parallel jobs in a row. With b busy processes
on c cores a fair system leaves our t threads c t / (t + b) cores, at most t, so that the step should take t over that
times as long as alone. Exits with 1 when it takes more than `--limit` times the fair time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time

import torch

from octavo.backends.cpu.gemm import CpuWeight, GemmOps
from octavo.backends.cpu.native import NativeContext, load
from octavo.backends.cpu.threads import default_num_threads
from octavo.core.backend.specs import WeightSpec

SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576))
LAYERS = 30


def spin() -> None:
    """A process that wants a whole core."""
    while True:
        sum(range(10_000))


class Step:
    """One model step's products."""

    def __init__(self, ops: GemmOps, rows: int) -> None:
        self._ops = ops
        self._calls: list[tuple[torch.Tensor, CpuWeight, torch.Tensor]] = []
        for k, n in SHAPES:
            weight = ops.prepare_weight(WeightSpec(n, k, torch.float32))
            weight.place(torch.randn(n, k), 0)
            self._calls.append((torch.randn(rows, k), weight, torch.empty(rows, n)))

    def seconds(self) -> float:
        start = time.perf_counter()
        for _ in range(LAYERS):
            for x, weight, out in self._calls:
                self._ops.gemm(x, weight, out=out)
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=2.5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = load()
    if library is None:
        raise SystemExit("the native kernels are not built")
    context = NativeContext(library, args.threads)
    step = Step(GemmOps(context), args.rows)
    cores = len(os.sched_getaffinity(0))
    processes = multiprocessing.get_context("spawn")
    alone = worst = 0.0
    print(f"{args.threads} threads, {cores} cores, {args.rows} rows; load average before {os.getloadavg()[0]:.1f}")
    for busy in sorted(args.busy):
        others = [processes.Process(target=spin, daemon=True) for _ in range(busy)]
        for other in others:
            other.start()
        time.sleep(1.0 if busy else 0.0)
        step.seconds()
        times = [step.seconds() for _ in range(args.steps)]
        for other in others:
            other.kill()
            other.join()
        mean = statistics.fmean(times)
        alone = alone or mean
        fair = args.threads / min(args.threads, cores * args.threads / (args.threads + busy))
        worst = max(worst, mean / alone / fair)
        print(
            f"{busy} busy: step {mean * 1e3:6.1f} ms on average, longest {max(times) * 1e3:6.1f} ms;",
            f"{mean / alone:4.1f} times alone, {fair:.1f} would be fair",
            flush=True,
        )
    context.close()
    sys.exit(worst > args.limit)


if __name__ == "__main__":
    main()
