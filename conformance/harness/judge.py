"""Turns what a candidate did into a verdict. The only place where a case's status is decided.

    Outcome ──► refused? raised? a defence hit? ──► trial drawn anew from the seed ──► its check ──► Status

The trial is built a second time, here, from (seed, name): the tensors that the oracle reads have never been in reach
of the candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.finding import Finding
from octavo.conformance.gaps import Gap, GapKind
from octavo.conformance.harness.attempt import execute
from octavo.conformance.harness.group import disagreements, execute_in_threads, of_rank, whole
from octavo.conformance.harness.result import BAD, CaseResult, Outcome, Status, digest_of
from octavo.core.backend import DeviceBackend


def judge(
    case: Case,
    backend: DeviceBackend,
    seed: int,
    *,
    peers: Sequence[DeviceBackend] = (),
    gap: Gap | None = None,
    strict: bool = False,
) -> CaseResult:
    """Run a case in this process and judge it. peers: the backends of the other ranks, for a case of a group."""
    if case.world == 1:
        outcomes = [execute(case, backend, seed, strict=strict)]
    else:
        outcomes = execute_in_threads(case, (backend, *peers), seed, strict=strict)
    return assess(case, Facts.of(backend.capabilities), outcomes, seed, backend_name=backend.name, gap=gap)


def assess(
    case: Case, facts: Facts, outcomes: Sequence[Outcome], seed: int, *, backend_name: str, gap: Gap | None = None
) -> CaseResult:
    """Judge what a candidate did, wherever it ran: an outcome per rank."""
    findings: list[Finding] = []
    outcome = whole(outcomes)
    if outcome.is_refused:
        status, detail = Status.UNSUPPORTED, outcome.reason
    elif outcome.error:
        status, detail = Status.FAIL, outcome.error
    else:
        findings, problems = _check(case, facts, outcomes, seed)
        status, detail = _verdict(outcome, problems)
    result = describe(case, status, detail, seed, backend_name)
    result.implementation, result.ops, result.seconds = outcome.implementation, outcome.ops, outcome.seconds
    result.digest = digest_of(outcomes)
    _summarize(result, findings)
    _refuse_bad_figures(result)
    _apply_gap(result, gap)
    return result


def describe(case: Case, status: Status, detail: str, seed: int, backend_name: str) -> CaseResult:
    """A result without measurements."""
    return CaseResult(
        name=case.name,
        op=case.op,
        axes=dict(case.axes),
        lanes=case.lanes,
        status=status,
        detail=detail,
        rerun=f"octavo conform --backend {backend_name} --seed {seed} --only {case.name}",
    )


def apply_gap(result: CaseResult, gap: Gap | None) -> CaseResult:
    """A result as the backend's declared gaps see it; for results that `assess` didn't make (crash, timeout)."""
    _apply_gap(result, gap)
    return result


def _check(case: Case, facts: Facts, outcomes: Sequence[Outcome], seed: int) -> tuple[list[Finding], list[str]]:
    findings: list[Finding] = []
    problems: list[str] = []
    for rank, outcome in enumerate(outcomes):
        trial = case.build(Draw(seed, case.name, case.summed_as, facts, rank=rank))
        for attempt in outcome.attempts:
            found = trial.check({name: x.tensor() for name, x in attempt.items()})
            findings += found if case.world == 1 else of_rank(rank, found)
    problems += disagreements(outcomes, trial.shared)
    if trial.is_empty:
        problems += [_problem(finding) for finding in findings if not finding.worst <= 1]
        return findings, problems
    if missing := set(case.lanes) - {f.lane for f in findings if f.compared}:
        problems.append(f"nothing was compared in lane {', '.join(sorted(missing))}")
    for finding in findings:
        if not finding.ok:
            problems.append(_problem(finding))
    return findings, problems


def _problem(finding: Finding) -> str:
    where = f" at {list(finding.index)}" if finding.index else ""
    parts = [f"{finding.share:.3g} of its bound{where}"]
    parts += [
        f"{name} {value:.3g} of its limit" for name, value in (("rms", finding.rms), ("gain", finding.gain)) if value
    ]
    return f"{finding.output} ({finding.lane}): {finding.message or ', '.join(parts)}"


def _verdict(outcome: Outcome, problems: list[str]) -> tuple[Status, str]:
    if outcome.faults or problems:
        return Status.FAIL, "; ".join([*outcome.faults, *problems][:4])
    if outcome.mistrust:
        return Status.MISTRUSTED, "; ".join(outcome.mistrust)
    if outcome.implementation == "fallback" or outcome.has_fallback_kernel:
        return Status.FALLBACK, outcome.reason
    return Status.PASS, outcome.reason


def _summarize(result: CaseResult, findings: list[Finding]) -> None:
    result.findings = findings
    if not findings:
        return
    worst = max(findings, key=lambda f: math.inf if math.isnan(f.share) else f.share)
    result.share, result.worst_output, result.worst_index = worst.share, worst.output, worst.index
    result.rms = max((f.rms for f in findings if f.rms is not None), default=None)
    result.gain = max((f.gain for f in findings if f.gain is not None), default=None)


def _refuse_bad_figures(result: CaseResult) -> None:
    """Whatever led to a good status: it never stands beside a figure beyond its limit, an infinite one or NaN."""
    figures = {"share": result.share, "rms": result.rms, "gain": result.gain}
    bad = [f"{name} {value:.3g}" for name, value in figures.items() if value is not None and not value <= 1]
    if bad and result.status not in BAD | {Status.UNSUPPORTED}:
        result.status, result.detail = Status.FAIL, f"{', '.join(bad)} of the limit, and no finding failed"


def _apply_gap(result: CaseResult, gap: Gap | None) -> None:
    if gap is None:
        return
    is_missing = result.status is Status.FALLBACK and gap.kind is GapKind.NOTIMPL
    if result.status in BAD or result.status is Status.UNSUPPORTED or is_missing:
        result.status = Status.WAIVED if gap.kind is GapKind.NEVER else Status.XFAIL
        result.detail = f"{gap.kind}: {gap.reason} ({result.detail})"
    else:
        result.detail = f"gaps.toml says {gap.kind} ({gap.reason}), and the case passes: remove the entry"
        result.status = Status.XPASS
