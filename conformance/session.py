"""One run of a profile on a backend: from the user's wishes to a Report.

    Settings ──► cases (suite.select) ─┐
             └─► Runners (worker pools) ─┼─► run_together ──► Report (report/json.py) with the profile's verdict
                 gaps.toml of the backend's package ─┘

The registry is asked for the backend's package here; the backend itself lives in the worker. The cases of the profiles
above the ops ("model", "engine") run likewise, and they alone import the engine: levels/.
"""

from __future__ import annotations

import datetime
import math
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace

from octavo.conformance import builds, perf, suite
from octavo.conformance.case import Case, always
from octavo.conformance.facts import Facts
from octavo.conformance.gaps import Gap, load_gaps
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.team import Shared, run_together
from octavo.conformance.harness.worker import (
    BackendChoice,
    InProcess,
    Runner,
    WorkerPool,
    left_out,
    make_backend,
)
from octavo.conformance.profiles import LEVELS, PROFILES, UNCASED, level_of, profile_named
from octavo.conformance.provenance import plug_in, software
from octavo.conformance.report.json import SCHEMA_VERSION, Device, Report, Run, entry
from octavo.conformance.verdict import chosen, verdict
from octavo.conformance.version import SPEC_VERSION, SUITE_VERSION, must_pass_hash
from octavo.core.backend import API_VERSION, BackendInfo, BackendRegistry
from octavo.core.base.errors import ConfigError

BUILT_IN = ("reference", "none")
"""Backends of the suite itself, which no registry knows."""

NOTHING_RAN = "its kernels were compiled, and none was run"

Progress = Callable[[CaseResult, int, int], None]
"""Told of every case that has ended: its result, its number, and how many there are."""


def fresh_seed() -> int:
    """One that nobody can have prepared for."""
    return secrets.randbelow(2**31)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user asks for.

    Attributes:
        backend: a name, or "auto".
        profile: None for "core", or for "full" when `only` narrows it (its level where it names one).
        only: an op, a case or a prefix of cases.
        options: of `--backend-option`.
        in_process: no worker: quicker, and a crash ends it all.
        timeout_s: of every case, instead of its own.
        strict: no fallback to the reference ops.
        target: of profile `compile`: the architecture to build for; None: the backend's own.
        beside: of profile `perf`: a core report of the same plug-in and device.
        jobs: processes that share the cases, each with a backend on the same device, or the builds; None: one for
            cases, and for builds one per core.
        budget_s: no case is begun later than this after the first; small ones come first then, and a run that leaves
            some out is not met.
    """

    backend: str
    profile: str | None = None
    only: str | None = None
    seed: int = field(default_factory=fresh_seed)
    options: dict[str, str] = field(default_factory=dict)
    in_process: bool = False
    timeout_s: float | None = None
    strict: bool = False
    target: str | None = None
    beside: Report | None = None
    jobs: int | None = None
    budget_s: float | None = None

    @property
    def profile_name(self) -> str:
        return self.profile or ((level_of(self.only) or "full") if self.only else "core")


def selected(settings: Settings) -> list[Case]:
    """The cases of the settings. Raises ConfigError when there are none."""
    cases = chosen(settings.profile_name, settings.only)
    if settings.timeout_s is None:
        return cases
    return [replace(case, timeout_s=settings.timeout_s) for case in cases]


def backend_info(name: str) -> BackendInfo:
    """The record of a backend that can run here. Raises BackendUnavailable."""
    if name in BUILT_IN:
        here = "octavo.conformance.harness.host"
        return BackendInfo(
            name=name,
            api_version=API_VERSION,
            distribution="octavo",
            probe=f"{here}:none",
            factory=f"{here}:HostBackend",
        )
    return BackendRegistry.discover().choose(name)


def open_runner(settings: Settings, name: str, *, num_threads: int | None = None) -> Runner:
    """A Runner of the named backend. Raises OctavoError when it can't be made."""
    choice = BackendChoice(
        name=name,
        options=settings.options,
        num_threads=num_threads,
        deterministic=profile_named(settings.profile_name).needs_determinism,
        strict=settings.strict,
        families=suite.modules_of(settings.profile_name),
    )
    if settings.in_process:
        return InProcess(make_backend(choice), strict=settings.strict, options=settings.options)
    return WorkerPool(choice)


@contextmanager
def open_runners(settings: Settings, name: str, *, num_threads: int | None = None) -> Iterator[list[Runner]]:
    """As many as the settings ask for, closed at the end. Raises OctavoError when one can't be made."""
    jobs = settings.jobs or 1
    if jobs > 1 and settings.in_process:
        raise ConfigError(f"--jobs {jobs} needs a worker process each; leave out --in-process", field="jobs")
    # They start side by side: imports take seconds.
    with ThreadPoolExecutor(jobs, initializer=_without_interrupts) as threads:
        starting = [threads.submit(open_runner, settings, name, num_threads=num_threads) for _ in range(jobs)]
    runners = [start.result() for start in starting if start.exception() is None]
    try:
        for start in starting:
            start.result()
        yield runners
    finally:
        for runner in runners:
            runner.close()


def _without_interrupts() -> None:
    """Keep Ctrl-C from the processes that this thread starts, which inherit its mask: our main thread ends them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def conform(settings: Settings, progress: Progress | None = None) -> Report:
    """Run it all. Raises UserError for a backend, profile, selection or gaps.toml that can't be."""
    if settings.profile_name in UNCASED:
        return _conform_uncased(settings, progress)
    cases = selected(settings)
    info = backend_info(settings.backend)
    refuse_engine_without_registry(settings.profile_name, info.name)
    gaps = load_gaps(info, known_cases(settings.profile_name))
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    with open_runners(settings, info.name) as runners:
        shared = measured(runners, cases, settings, gaps=gaps, progress=progress)
    facts = runners[0].facts
    if profile_named(settings.profile_name).needs_determinism and facts.batch_invariant:
        with open_runners(settings, info.name, num_threads=1) as alone:
            compare_threads(alone, cases, shared.results, settings.seed)
    run = _run(
        settings,
        info,
        facts,
        started,
        time.monotonic() - clock,
        isolated=not settings.in_process,
        ranks=max((case.world for case in cases if left_out(case, runners[0]) is None), default=1),
    )
    return _report(run, settings, shared.results, shared.inapplicable, not_run=shared.not_run)


def _conform_uncased(settings: Settings, progress: Progress | None) -> Report:
    """A profile without cases: what the backend's compiler makes, or how fast its device is."""
    started, clock = datetime.datetime.now(datetime.UTC), time.monotonic()
    not_run: list[str] = []
    if settings.profile_name == "compile":
        info = BackendRegistry.discover().info(settings.backend)
        results = builds.build_all(info.name, settings.target, settings.only, jobs=settings.jobs, on_result=progress)
        facts = builds.facts_of(results[0].axes["target"])
    else:
        info = backend_info(settings.backend)
        with closing(make_backend(BackendChoice(name=info.name, options=settings.options))) as backend:
            facts = Facts.of(backend.capabilities)
            budget_s = math.inf if settings.budget_s is None else settings.budget_s
            results, not_run = perf.time_all(backend, settings.only, budget_s=budget_s, on_result=progress)
    is_built = settings.profile_name == "compile"
    run = _run(settings, info, facts, started, time.monotonic() - clock, isolated=is_built, ranks=1)
    no_claim = NOTHING_RAN if is_built else perf.fault_of(settings.beside, run)
    return _report(run, settings, results, {}, no_claim=no_claim, not_run=not_run)


def refuse_engine_without_registry(profile: str, backend: str) -> None:
    """Raises ConfigError for the engine on a backend of the suite itself: an engine finds its backend by name."""
    if profile == "engine" and backend in BUILT_IN:
        raise ConfigError(
            f"profile engine makes the backend as the engine does, which knows none named {backend}; "
            "run profile model, or name a backend that `octavo backends` lists",
            field="profile",
        )


def _run(
    settings: Settings,
    info: BackendInfo,
    facts: Facts,
    started: datetime.datetime,
    seconds: float,
    *,
    isolated: bool,
    ranks: int = 1,
) -> Run:
    return Run(
        suite_version=SUITE_VERSION,
        spec_version=SPEC_VERSION,
        must_pass=must_pass(settings.profile_name),
        profile=settings.profile_name,
        only=settings.only or "",
        seed=settings.seed,
        backend=info.name,
        options=settings.options,
        isolated=isolated,
        started=started.isoformat(timespec="seconds"),
        seconds=round(seconds, 2),
        plug_in=plug_in(info),
        software=software(facts.versions),
        device=_device(facts, ranks),
        capabilities=facts,
    )


def _report(
    run: Run,
    settings: Settings,
    results: Sequence[CaseResult],
    not_applicable: dict[str, str],
    no_claim: str = "",
    not_run: Sequence[str] = (),
) -> Report:
    entries = [entry(result) for result in results]
    budget_s = math.inf if settings.budget_s is None else settings.budget_s
    return Report(
        schema_version=SCHEMA_VERSION,
        run=run,
        verdict=verdict(run, entries, no_claim=no_claim, not_run=len(not_run), budget_s=budget_s),
        cases=entries,
        not_applicable=not_applicable,
        not_run=list(not_run),
    )


def measured(
    runners: Sequence[Runner],
    cases: Sequence[Case],
    settings: Settings,
    *,
    gaps: dict[str, Gap] | None = None,
    progress: Progress | None = None,
) -> Shared:
    """`run_together` with the settings' seed and budget; every rerun command carries what they add to a plain call."""
    extra = _option_flags(settings)
    if profile_named(settings.profile_name).needs_determinism:
        extra += f" --profile {settings.profile_name}"
    done, total = 0, sum(left_out(case, runners[0]) is None for case in cases)
    deadline = math.inf if settings.budget_s is None else time.monotonic() + settings.budget_s

    def ended(result: CaseResult) -> None:
        nonlocal done
        done += 1
        result.rerun += extra
        if progress is not None:
            progress(result, done, total)

    return run_together(runners, cases, settings.seed, gaps=gaps, on_result=ended, deadline=deadline)


def compare_threads(alone: Sequence[Runner], cases: Sequence[Case], results: Sequence[CaseResult], seed: int) -> None:
    """Fail what has other bits on the runners' one thread than it had on the backend's own choice of threads."""
    right = {result.name: result for result in results if result.status in (Status.PASS, Status.FALLBACK)}
    # Whether they concern the backend is settled.
    repeated = run_together(alone, [replace(case, requires=always) for case in cases if case.name in right], seed)
    for again in repeated.results:
        result = right[again.name]
        if again.digest != result.digest:
            result.status = Status.FAIL
            result.detail = f"other bits on one thread ({again.status}: {again.detail or 'within its bound'})"


def known_cases(profile: str) -> list[Case]:
    """Every case of an op, and those of the profile's level where it is one: what a gaps.toml may name."""
    return [
        *suite.families().values(),
        *(suite.families(suite.modules_of(profile)).values() if profile in LEVELS else ()),
    ]


def must_pass(profile: str) -> dict[str, str]:
    """Profile -> hash of its cases: of all profiles of ops, and of the given one."""
    names = dict.fromkeys((*PROFILES, profile))
    return {
        name: must_pass_hash(profile_named(name), suite.families(suite.modules_of(name)).values()) for name in names
    }


def _option_flags(settings: Settings) -> str:
    return "".join(f" --backend-option {shlex.quote(f'{k}={v}')}" for k, v in settings.options.items())


def _device(facts: Facts, count: int) -> Device:
    return Device(name=facts.device_name, arch=facts.arch, count=count, total_memory_bytes=facts.total_memory_bytes)
