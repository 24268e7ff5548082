"""What a report says of itself, checked without running anything: its parts must agree with each other and the suite.

    cases, not_run, not_applicable ──► each name once, none of the profile left out, none too many
    entry                          ──► its case in the suite; a good status only beside figures within their limits
    run + cases + not_run          ──► the verdict, worked out anew (verdict.py)
    run.device                     ──► the device of run.capabilities

An edit that survives this must be consistent, and touches what replaying compares (verify.py).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping

from octavo.conformance import suite
from octavo.conformance.case import Case
from octavo.conformance.harness.result import OWN_KERNELS, Status
from octavo.conformance.report.json import Entry, Report
from octavo.conformance.verdict import chosen, verdict
from octavo.core.base.errors import ConfigError

GOOD = frozenset({Status.PASS, Status.FALLBACK})


def contradictions(report: Report) -> list[str]:
    """A line per thing that can't be so."""
    run = report.run
    try:
        selected = chosen(run.profile, run.only or None)
    except ConfigError as error:
        return [f"run.only is {run.only!r}, which no run of profile {run.profile} can have: {error}"]
    known = suite.families(suite.modules_of(run.profile))
    lines = [*_names(report, selected)]
    for entry in report.cases:
        lines += (f"{entry.id}: {what}" for what in _entry_faults(entry, known))
    return [*lines, *_device(report, selected), *_verdict(report)]


def _is_run(case: Case, report: Report) -> bool:
    """Whether a run of these capabilities has a result for the case, given the time."""
    run = report.run
    return case.requires(run.capabilities) is None and (run.isolated or case.world == 1)


def _names(report: Report, selected: list[Case]) -> Iterator[str]:
    """Names that stand twice, or at the wrong place, or nowhere."""
    lists = {
        "cases": [entry.id for entry in report.cases],
        "not_run": report.not_run,
        "not_applicable": list(report.not_applicable),
    }
    for name, count in collections.Counter(n for names in lists.values() for n in names).items():
        if count > 1:
            yield f"{name}: {count} times in the report"
    wanted = {case.name for case in selected if _is_run(case, report)}
    present = {*lists["cases"], *lists["not_run"]}
    for name in sorted(wanted - present):
        yield f"{name}: belongs to the profile, and is not in the report"
    for name in sorted(present - wanted):
        yield f"{name}: in the report, and not of the profile on this backend"
    others = {case.name for case in selected} - wanted
    for name in sorted(others ^ set(report.not_applicable) - wanted):
        place = "not in" if name in others else "in"
        yield f"{name}: {place} the report's not_applicable"


def _entry_faults(entry: Entry, known: Mapping[str, Case]) -> Iterator[str]:
    case = known.get(entry.id)
    if case is not None and (entry.op, entry.parameters, entry.lanes) != (case.op, dict(case.axes), list(case.lanes)):
        yield "its op, parameters or lanes are not those of the suite's case"
    if entry.status not in GOOD:
        return
    for name in ("share", "rms", "gain"):
        figure = getattr(entry, name)
        if figure is not None and not 0 <= float(figure) <= 1:
            yield f"{entry.status}, with {name} {figure}: beyond its limit"
    is_fallback = entry.implementation == "fallback" or any(f"{op}:fallback" in entry.ran for op in OWN_KERNELS)
    if is_fallback != (entry.status is Status.FALLBACK):
        yield f"{entry.status}, and ran on {entry.implementation or 'nothing'} ({', '.join(entry.ran)})"


def _device(report: Report, selected: list[Case]) -> Iterator[str]:
    device, facts = report.run.device, report.run.capabilities
    ranks = max((case.world for case in selected if _is_run(case, report)), default=1)
    for what, told, declared in (
        ("name", device.name, facts.device_name),
        ("arch", device.arch, facts.arch),
        ("total_memory_bytes", device.total_memory_bytes, facts.total_memory_bytes),
        ("count", device.count, ranks),
    ):
        if told != declared:
            yield f"run.device.{what} is {told}, and by the rest of the report {declared}"


def _verdict(report: Report) -> Iterator[str]:
    told = report.verdict
    right = verdict(report.run, report.cases, not_run=len(report.not_run))
    for name in ("profile", "is_met", "is_claim", "no_claim"):
        theirs, ours = getattr(told, name), getattr(right, name)
        if theirs != ours:
            yield f"verdict.{name} is {theirs!r}; the report's own cases and run give {ours!r}"
    given, found = (collections.Counter(map(_without_budget, v.reasons)) for v in (told, right))
    if given != found:
        first = next(iter((found - given) or (given - found)))
        yield (
            f"verdict.reasons has {len(told.reasons)} lines; the report's own cases give {len(right.reasons)}; "
            f"the first that differs: {first}"
        )


def _without_budget(reason: str) -> str:
    """The report doesn't hold the run's budget."""
    return re.sub(r"the budget of \S+ s was spent$", "the budget was spent", reason)
