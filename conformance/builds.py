"""Profile `compile`: every kernel that a backend can build without its device, built and judged.

    BackendInfo.builds ──► names ──► worker processes, each of which lists the builds itself ──► a CaseResult each

No device, no driver and no number is involved: a pass says that the compiler made of a kernel what the backend says a
fit one looks like (registers, memory, instructions), and nothing more. A compiler that crashes costs one build.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from octavo.conformance.facts import Facts
from octavo.conformance.harness.result import CaseResult, Status
from octavo.core.backend import BackendRegistry
from octavo.core.backend.builds import KernelBuild
from octavo.core.backend.registry import load_builds
from octavo.core.base.errors import ConfigError

LANE = "compiled"

Built = tuple[str, float, dict[str, float], tuple[str, ...]]
"""Name, seconds, figures and faults: what crosses from a worker."""


def build_all(
    backend: str,
    target: str | None,
    only: str | None,
    *,
    jobs: int | None = None,
    on_result: Callable[[CaseResult, int, int], None] | None,
) -> list[CaseResult]:
    """Build what `only` (an op, a name or a prefix) leaves, on `jobs` processes (None: one per core).

    Raises:
        ConfigError: nothing is left, or the target isn't known.
        BackendUnavailable: the backend's list can't be had.
    """
    builds = {b.name: b for b in _listed(backend, target) if only is None or b.op == only or b.name.startswith(only)}
    if not builds:
        raise ConfigError(f"no build of backend {backend} fits {only}", field="only")
    results = {}
    for name, answer in _answers(backend, target, list(builds), jobs or len(os.sched_getaffinity(0))):
        results[name] = _judged(builds[name], backend, answer)
        if on_result is not None:
            on_result(results[name], len(results), len(builds))
    return [results[name] for name in builds]


def facts_of(target: str) -> Facts:
    """What is known of a device that isn't there: the name of its architecture."""
    return Facts(
        device_name="none: compiled ahead of time",
        arch=target,
        activations=(),
        weights=(),
        kv_dtypes=(),
        fp8=None,
        graphs=False,
        dynamic_shapes=True,
        token_buckets=(),
        accumulation={},
        deterministic=True,
        batch_invariant=False,
        total_memory_bytes=0,
        versions={},
    )


@functools.cache
def _listed(backend: str, target: str | None) -> Sequence[KernelBuild]:
    return load_builds(BackendRegistry.discover().info(backend), target)


def _build(backend: str, target: str | None, name: str) -> Built:
    """In a worker."""
    build = next(b for b in _listed(backend, target) if b.name == name)
    started = time.perf_counter()
    try:
        result = build.build()
        figures, faults = dict(result.figures), result.faults
    except Exception as error:
        figures, faults = {}, (f"{type(error).__name__}: {error}"[:2000],)
    return name, time.perf_counter() - started, figures, faults


def _answers(backend: str, target: str | None, names: list[str], jobs: int) -> Iterator[tuple[str, Built | None]]:
    """What became of each build, as they end; None where the compiler took its process with it."""
    suspects = []
    with _pool(jobs) as pool:
        waiting: dict[Future[Built], str] = {pool.submit(_build, backend, target, name): name for name in names}
        for future in as_completed(waiting):
            try:
                yield waiting[future], future.result()
            except BrokenProcessPool:
                suspects.append(waiting[future])
    for name in suspects:  # One of them ended the pool; each gets a process of its own.
        with _pool(1) as pool:
            try:
                yield name, pool.submit(_build, backend, target, name).result()
            except BrokenProcessPool:
                yield name, None


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def _judged(build: KernelBuild, backend: str, answer: Built | None) -> CaseResult:
    _, seconds, figures, faults = answer or (build.name, 0.0, {}, ("the compiler ended its process",))
    status = Status.CRASH if answer is None else Status.FAIL if faults else Status.PASS
    return CaseResult(
        name=build.name,
        op=build.op,
        axes={"target": build.target},
        lanes=(LANE,),
        status=status,
        implementation="own",
        detail="; ".join(faults),
        figures=figures,
        seconds=seconds,
        rerun=f"octavo conform --backend {backend} --profile compile --target {build.target} --only {build.name}",
    )
