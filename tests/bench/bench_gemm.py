"""Times the CPU GEMM on SmolLM2-135M's products beside torch.nn.functional.linear, interleaved in one run.

    PYTHONPATH=src python tests/bench/bench_gemm.py [--threads 2] [--isa avx2] [--dtype bf16] [--rows 1 8 32 128]

Each product runs over enough copies of its weight to stream from memory, as a model's layers do. Reported per shape:
the tenth percentile of the times (others may share the machine), weight bytes per second (GB/s) and arithmetic
(GFLOP/s); then one step's products over the whole model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from octavo.backends.cpu.gemm import CpuWeight, GemmOps
from octavo.backends.cpu.native import NativeContext, load
from octavo.backends.cpu.threads import default_num_threads
from octavo.core.backend.ops import Epilogue
from octavo.core.backend.specs import WeightSpec

LAYERS = 30
SHAPES = (  # name, K, N, gated, times per step
    ("qkv", 576, 576 + 2 * 192, False, LAYERS),
    ("o", 576, 576, False, LAYERS),
    ("gate_up", 576, 3072, True, LAYERS),
    ("down", 1536, 576, False, LAYERS),
    ("lm_head", 576, 49152, False, 1),
)
STREAMED_BYTES = 160 << 20
"""Weights in rotation, so that no cache holds them."""


def quick_seconds(calls: list[Callable[[int], None]], copies: int, repeats: int) -> list[float]:
    """The tenth percentile of each call's time per product, the calls taking turns over all copies of the weight."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for record, call in zip(times, calls, strict=True):
            for copy in range(copies):
                start = time.perf_counter()
                call(copy)
                record.append(time.perf_counter() - start)
    return [sorted(record)[len(record) // 10] for record in times]


def bench_shape(
    ops: GemmOps, k: int, n: int, gated: bool, rows: int, dtype: torch.dtype, repeats: int
) -> tuple[float, float]:
    """Seconds per product: Octavo's, torch's."""
    copies = max(1, STREAMED_BYTES // (n * k * dtype.itemsize))
    plain = [torch.randn(n, k).to(dtype) for _ in range(copies)]
    packed: list[CpuWeight] = []
    for weight in plain:
        packed.append(ops.prepare_weight(WeightSpec(n, k, dtype, gated=gated)))
        packed[-1].place(weight, 0)
    x = torch.randn(rows, k)
    x_torch = x.to(dtype)
    out = torch.empty(rows, n // 2 if gated else n)
    epilogue = Epilogue(gate="silu") if gated else None

    def ours(copy: int) -> None:
        ops.gemm(x, packed[copy], out=out, epilogue=epilogue)

    def torch_linear(copy: int) -> None:
        y = torch.nn.functional.linear(x_torch, plain[copy])
        if gated:
            torch.nn.functional.silu(y[:, : n // 2]).mul_(y[:, n // 2 :])

    ours_s, torch_s = quick_seconds([ours, torch_linear], copies, repeats)
    return ours_s, torch_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--isa", default=None)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=4)
    args = parser.parse_args()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    library = load()
    if library is None:
        raise SystemExit("the native kernels are not built")
    context = NativeContext(library, args.threads, args.isa)
    torch.set_num_threads(args.threads)
    ops = GemmOps(context)
    print(f"isa {context.isa}, {args.threads} threads, {args.dtype} weights; tenth percentile")
    print(f"{'rows':>4} {'product':8} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8} | {'torch ms':>8} {'GFLOP/s':>8}")
    for rows in args.rows:
        layers_ms = [0.0, 0.0]
        for name, k, n, gated, times in SHAPES:
            seconds = bench_shape(ops, k, n, gated, rows, dtype, args.repeats)
            gigabytes, gigaflops = n * k * dtype.itemsize / 1e9, 2 * rows * n * k / 1e9
            print(
                f"{rows:4} {name:8} {seconds[0] * 1e3:8.3f}",
                f"{gigabytes / seconds[0]:7.1f} {gigaflops / seconds[0]:8.1f}",
                f"| {seconds[1] * 1e3:8.3f} {gigaflops / seconds[1]:8.1f}",
                flush=True,
            )
            if times == LAYERS:
                layers_ms = [total + s * times * 1e3 for total, s in zip(layers_ms, seconds, strict=True)]
        print(f"{rows:4} 30 layers {layers_ms[0]:7.1f} ms | torch {layers_ms[1]:.1f} ms\n", flush=True)
    context.close()


if __name__ == "__main__":
    main()
