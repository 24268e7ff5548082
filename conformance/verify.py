"""Checks somebody's report: a random share of its cases is run again with its seed, and must come out the same.

    Report ──► same suite, specification and cases? ──► consistent in itself (audit.py)?
           ──► sample ──► run with its seed ──► capabilities, statuses equal, figures equal

The figures are compared only where they are bound to repeat: the same kind of device and plug-in, declared
deterministic. Everywhere the statuses are. What was not compared, and why, is part of the outcome.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.conformance import suite
from octavo.conformance.audit import contradictions
from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.gaps import load_gaps
from octavo.conformance.profiles import LEVELS, PROFILES, UNCASED
from octavo.conformance.provenance import plug_in, software
from octavo.conformance.report.json import Entry, Figure, Report, entry
from octavo.conformance.session import (
    Progress,
    Settings,
    backend_info,
    known_cases,
    measured,
    must_pass,
    open_runners,
    refuse_engine_without_registry,
)
from octavo.conformance.version import SPEC_VERSION, SUITE_VERSION
from octavo.core.backend import BackendInfo
from octavo.core.base.errors import ConfigError

DEFAULT_SHARE = 0.1
FEWEST = 20
"""Cases that are replayed at least, if the report has as many."""

TOLERANCE = 1e-6
"""Relative, of a figure: the oracle's own float64 sums may be split otherwise on another host."""


@dataclass(frozen=True)
class Outcome:
    """What replaying gave.

    Attributes:
        differences: a line per case that came out otherwise, and per thing in the report that can't be so.
        uncompared: why figures were not compared; empty when they were.
        notes: cases that could not be replayed, and why.
    """

    replayed: int
    differences: list[str]
    uncompared: list[str]
    notes: list[str]

    @property
    def holds(self) -> bool:
        return self.replayed > 0 and not self.differences


def verify(
    report: Report, share: float, progress: Progress | None = None, *, in_process: bool = False, jobs: int | None = None
) -> Outcome:
    """Replay. Raises ConfigError for a report of another suite, BackendUnavailable when its backend isn't here."""
    refuse_foreign(report)
    run = report.run
    sample = _sample(report.cases, share)
    suite_cases = suite.families(suite.modules_of(run.profile))
    cases = [_case(known, suite_cases) for known in sample]
    settings = Settings(
        backend=run.backend, profile=run.profile, seed=run.seed, options=run.options, in_process=in_process, jobs=jobs
    )
    info = backend_info(run.backend)
    refuse_engine_without_registry(run.profile, info.name)
    gaps = load_gaps(info, known_cases(run.profile))
    with open_runners(settings, info.name) as runners:
        facts = runners[0].facts
        unable = {case.name: why for case in cases if (why := runners[0].unable(case)) is not None}
        able = [case for case in cases if case.name not in unable]
        shared = measured(runners, able, settings, gaps=gaps, progress=progress)
    uncompared = _uncompared(report, info, facts)
    again = {result.name: entry(result) for result in shared.results}
    differences = [
        f"{name}: in the report, and not for this backend: {why}" for name, why in shared.inapplicable.items()
    ]
    for known in sample:
        if known.id in again and (what := compared(known, again[known.id], with_figures=not uncompared)):
            differences.append(f"{known.id}: {what}")
    differences += _other_capabilities(report.run.capabilities, facts)
    differences += contradictions(report)
    notes = [f"{name}: not replayed: {why}" for name, why in unable.items()]
    return Outcome(len(shared.results), differences, uncompared, notes)


def refuse_foreign(report: Report) -> None:
    """Raises ConfigError when the report's figures mean something else here."""
    run = report.run
    if run.profile in UNCASED:
        raise ConfigError(f"a report of profile {run.profile} has no cases to replay; run it again", field="report")
    for what, theirs, ours in (
        ("suite version", run.suite_version, SUITE_VERSION),
        ("specification version", run.spec_version, SPEC_VERSION),
    ):
        if theirs != ours:
            raise ConfigError(
                f"the report has {what} {theirs}, this suite {ours}: {_remedy(report, f'is of another {what}')}",
                field="report",
            )
    if run.profile not in PROFILES | LEVELS:
        raise ConfigError(
            f"the report is of the profile {run.profile!r}, which this suite doesn't have", field="report"
        )
    theirs_hash, ours_hash = run.must_pass.get(run.profile, "none"), must_pass(run.profile)[run.profile]
    if theirs_hash != ours_hash:
        raise ConfigError(
            f"the report's must-pass hash of profile {run.profile} is {theirs_hash}, this suite's {ours_hash}: the "
            f"profile's cases differ; {_remedy(report, 'is of other cases')}",
            field="report",
        )


def _remedy(report: Report, what: str) -> str:
    """What to do about a report that says it was made by another suite."""
    theirs, ours = report.run.software.octavo, software({}).octavo
    if theirs != ours:
        return f"verify it with Octavo {theirs}"
    return f"the report names Octavo {theirs}, which is the one here, and {what} than its Octavo has; make it anew"


def compared(known: Entry, again: Entry, *, with_figures: bool) -> str:
    """What differs between two runs of a case; empty when nothing does."""
    if known.status != again.status:
        return f"{again.status}, and {known.status} in the report: {again.detail or known.detail}"
    if known.implementation != again.implementation:
        return f"ran on {again.implementation or 'nothing'}, and on {known.implementation or 'nothing'} in the report"
    if known.ran != again.ran:
        return f"bound {', '.join(again.ran) or 'nothing'}, and {', '.join(known.ran) or 'nothing'} in the report"
    for name in ("share", "rms", "gain") if with_figures else ():
        here, there = getattr(again, name), getattr(known, name)
        if not _equal(here, there):
            return f"{name} {here}, and {there} in the report"
    return ""


def _equal(a: Figure, b: Figure) -> bool:
    if a is None or b is None or isinstance(a, str) or isinstance(b, str):
        return a == b
    return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _sample(entries: Sequence[Entry], share: float) -> list[Entry]:
    count = min(len(entries), max(FEWEST, math.ceil(share * len(entries))))
    chosen = sorted(random.SystemRandom().sample(range(len(entries)), count))
    return [entries[i] for i in chosen]


def _case(known: Entry, suite_cases: Mapping[str, Case]) -> Case:
    case = suite_cases.get(known.id)
    if case is None:
        raise ConfigError(f"the report has the case {known.id}, which this suite doesn't have", field="report")
    return case


def _other_capabilities(told: Facts, here: Facts) -> list[str]:
    """What the backend declares otherwise here, on a device of the same name: that decides cases and claims."""
    if told.device_name != here.device_name:
        return []
    # Drivers, memory and groups are the host's, which may be another one.
    names = [n for n in Facts.__struct_fields__ if n not in ("versions", "total_memory_bytes", "world_sizes")]
    return [
        f"run.capabilities.{name} is {getattr(told, name)}, and {getattr(here, name)} here"
        for name in names
        if getattr(told, name) != getattr(here, name)
    ]


def _uncompared(report: Report, info: BackendInfo, facts: Facts) -> list[str]:
    """Why figures need not repeat here."""
    run, here = report.run, plug_in(info)
    reasons = [] if facts.deterministic else ["the backend declares itself non-deterministic"]
    pairs = [
        ("device", run.device.name, facts.device_name),
        ("architecture", run.device.arch, facts.arch),
        ("version of its package", run.plug_in.version, here.version),
        ("commit", run.plug_in.git, here.git),
        ("torch", run.software.torch, software({}).torch),
    ]
    return reasons + [f"{what} {ours}, and {theirs} in the report" for what, theirs, ours in pairs if theirs != ours]
