"""Profile `perf`: how fast the contract's workloads run, as shares of what the same device was measured to be able to.

    limits      bytes a second of a large copy; operations a second of a large product, by operand    (torch's own)
    workloads   seconds of a call, hence bytes and operations a second                                (the backend's)
                numbers are random; weights and KV come from memory and not from a cache: workloads/base.py
    share       of the limit that binds: the longer of bytes / bandwidth and operations / rate, over the call's time

Both are measured in the same run. A fallback's time says nothing of a backend, so a workload that it doesn't run itself
is left out. Nothing passes or fails by its speed: figures are a claim only beside a core pass of the same plug-in.
Source of the share: Williams et al. 2009 (roofline).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.report.json import Report, Run
from octavo.core.backend import (
    AttentionSpec,
    CacheSpec,
    DeviceBackend,
    KVCache,
    KVCacheSpec,
    KVLayout,
    OpSpec,
)
from octavo.core.backend.workloads import Cost, Tensors, Workload, list_workloads
from octavo.core.backend.workloads.timing import seconds_of
from octavo.core.base.errors import ConfigError

LANE = "timed"
COPY_BYTES = 1 << 30
COPY_SHARE = 16
"""The copied tensor is at most this part of the free memory."""

PRODUCT_SIZE = 8192
FP8 = {"e4m3fn": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, None: None}

Progress = Callable[[CaseResult, int, int], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What the device was measured to be able to.

    Attributes:
        bytes_per_s: read and written.
        flops: by operand; only those that torch multiplies there.
    """

    bytes_per_s: float
    flops: dict[str, float]

    def seconds(self, cost: Cost) -> float | None:
        """The least time of a call; None when the rate of an operand is unknown."""
        if not cost.flops.keys() <= self.flops.keys():
            return None
        return max(cost.bytes / self.bytes_per_s, *(n / self.flops[operand] for operand, n in cost.flops.items()), 0.0)


def time_all(
    backend: DeviceBackend, only: str | None, *, budget_s: float = math.inf, on_result: Progress | None = None
) -> tuple[list[CaseResult], list[str]]:
    """Time what `only` (an op, a name or a prefix) leaves: results, and the names that there was no time for.

    Raises:
        ConfigError: nothing is left.
    """
    deadline = time.monotonic() + budget_s
    every = list_workloads(activation_dtype(backend), FP8[backend.capabilities.fp8])
    chosen = [w for w in every if only is None or w.op == only or _name(w).startswith(only)]
    if not chosen:
        raise ConfigError(f"no workload fits {only}", field="only")
    limits = measured_limits(backend)
    results: list[CaseResult] = []
    for workload in chosen:
        if time.monotonic() >= deadline:
            break
        results.append(_result(backend, workload, limits))
        if on_result is not None:
            on_result(results[-1], len(results), len(chosen))
    return results, [_name(workload) for workload in chosen[len(results) :]]


def activation_dtype(backend: DeviceBackend) -> torch.dtype:
    """What models compute in when nobody asks for anything else."""
    return backend.capabilities.activation_dtype[backend.capabilities.default_dtype]


@contextmanager
def _all_host_threads() -> Iterator[None]:
    """A backend on the host may keep torch to one thread, which would measure one core and not the device."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_all_host_threads()
def measured_limits(backend: DeviceBackend) -> Limits:
    """Of the device, through torch's own copy and product."""
    free = backend.memory_info().free_bytes
    nbytes = min(COPY_BYTES, free // COPY_SHARE)
    source, target = (backend.empty(nbytes, dtype=torch.uint8) for _ in range(2))
    copy_s = seconds_of(backend, lambda: target.copy_(source))
    flops = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        size = PRODUCT_SIZE if backend.capabilities.graphs else PRODUCT_SIZE // 8
        flops[str(dtype).removeprefix("torch.")] = _product_rate(backend, size, dtype)
    # Where no product of 8 bits is to be had from torch, the figure of 16 bits doubled stands in: every chip that has
    # both multiplies 8 bits at twice the rate.
    flops |= {"float8": 2 * flops["bfloat16"], "int8": 2 * flops["bfloat16"]}
    return Limits(2 * nbytes / copy_s, flops)


def _product_rate(backend: DeviceBackend, size: int, dtype: torch.dtype) -> float:
    a, b, out = (backend.empty(size, size, dtype=dtype).fill_(0.5) for _ in range(3))
    return 2 * size**3 / seconds_of(backend, lambda: torch.mm(a, b, out=out))


def _result(backend: DeviceBackend, workload: Workload, limits: Limits) -> CaseResult:
    result = CaseResult(
        name=_name(workload),
        op=workload.op,
        axes={"workload": workload.name},
        lanes=(LANE,),
        status=Status.PASS,
        implementation="own",
        rerun=f"octavo conform --backend {backend.name} --profile perf --only {_name(workload)}",
    )
    refusal = _refusal(backend, workload)
    if refusal is not None:
        result.status, result.implementation, result.detail = Status.FALLBACK, "fallback", f"not timed: {refusal}"
        return result
    try:
        tensors = Tensors(
            backend.device, activation_dtype(backend), lambda spec, blocks: _kv_cache(backend, spec, blocks)
        )
        calls = workload.prepare_all(backend.ops, tensors, backend.capabilities.cache_bytes)
        seconds = seconds_of(backend, *calls)
    except Exception as error:
        result.status, result.detail = Status.FAIL, f"{type(error).__name__}: {error}"
        return result
    result.seconds = seconds
    result.figures = _figures(workload.cost, seconds, limits)
    return result


def _figures(cost: Cost, seconds: float, limits: Limits) -> dict[str, float]:
    least = limits.seconds(cost)
    flops = sum(cost.flops.values())
    return {
        "us": round(seconds * 1e6, 2),
        "gigabytes_per_s": round(cost.bytes / seconds / 1e9, 1),
        "teraflops_per_s": round(flops / seconds / 1e12, 2),
        **({} if least is None else {"share_of_limit": round(least / seconds, 3)}),
        "limit_gigabytes_per_s": round(limits.bytes_per_s / 1e9, 1),
    }


def _refusal(backend: DeviceBackend, workload: Workload) -> str | None:
    if getattr(backend.ops, workload.op, None) is None:
        return f"{backend.name} has no {workload.op}"
    answer = backend.ops.supports(workload.op, _localized(backend, workload))
    return None if answer is None else answer.reason


def _localized(backend: DeviceBackend, workload: Workload) -> OpSpec:
    """The spec with the layout in which this backend keeps such a cache."""
    spec = workload.spec
    if not isinstance(spec, AttentionSpec | CacheSpec) or workload.op == "attention":
        return spec
    v_head_dim = 0 if spec.layout is KVLayout.MLA else spec.v_head_dim
    kv_spec = KVCacheSpec(spec.num_kv_heads, spec.head_dim, v_head_dim, spec.kv_dtype, spec.block_size)
    return replace(spec, layout=_kv_cache(backend, kv_spec, 1).layout)


def _kv_cache(backend: DeviceBackend, spec: KVCacheSpec, num_blocks: int) -> KVCache:
    return backend.kv_view(backend.allocate_kv_pool(num_blocks, spec.block_bytes), spec)


def fault_of(core: Report | None, run: Run) -> str:
    """Why a core report does not vouch for the numbers of what was timed; empty when it does."""
    if core is None:
        return "no core report stands beside it (--beside REPORT)"
    if core.run.profile != "core" or not (core.verdict.is_met and core.verdict.is_claim):
        return "the report beside it is no pass of the whole profile core"
    if core.run.plug_in != run.plug_in or run.plug_in.dirty:
        return "the core report beside it is of another plug-in or commit, or of changed files"
    return "" if core.run.device == run.device else "the core report beside it is of another device"


def _name(workload: Workload) -> str:
    return f"perf.{workload.op}/{workload.name}"
