"""A report in the terminal.

paged_attention   96  own          pass 96                    0.41 of its bound
gemm             102  own          pass 100 · fail 2          inf   gemm.exact/float32-m17-n48-k100

Of builds and measurements, which have no bounds, the last column holds the spread of their figures.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.conformance.report.figures import spread
from octavo.conformance.report.json import Entry, Report

REASONS_SHOWN = 12


@dataclass(frozen=True)
class OpSummary:
    """All cases of one op.

    Attributes:
        statuses, implementations: how many of each.
        worst: the largest share of a limit, and the case that has it; None without figures.
        plain: the largest error over a plain implementation's, where known.
        figures: the spread of what builds or measurements gave.
    """

    op: str
    cases: int
    statuses: Mapping[str, int]
    implementations: Mapping[str, int]
    worst: tuple[float, Entry] | None
    plain: float | None
    figures: str = ""


def by_op(entries: Iterable[Entry]) -> list[OpSummary]:
    """A summary per op, in the order in which the ops first appear."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.op, []).append(entry)
    return [_summary(op, group) for op, group in groups.items()]


def _summary(op: str, entries: Sequence[Entry]) -> OpSummary:
    shares = [(worst, entry) for entry in entries if (worst := entry.worst) is not None]
    plains = [float(entry.plain) for entry in entries if entry.plain is not None]
    return OpSummary(
        op=op,
        cases=len(entries),
        statuses=collections.Counter(str(entry.status) for entry in entries),
        implementations=collections.Counter(entry.implementation for entry in entries if entry.implementation),
        worst=max(shares, key=lambda pair: pair[0], default=None),
        plain=max(plains, default=None),
        figures=spread(entries),
    )


def counted(counts: Mapping[str, int]) -> str:
    """ "pass 96 · fail 2", or the name alone when there is only one."""
    return " · ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def number(value: float | None) -> str:
    """A share in three digits; "-" for none."""
    return "-" if value is None else f"{value:.3g}"


def render(report: Report) -> str:
    """The table and the verdict, a few dozen lines."""
    summaries = by_op(report.cases)
    title = "figures, from the least to the most" if any(s.figures for s in summaries) else "worst share of its bound"
    rows = [("op", "cases", "runs on", "status", title)]
    rows += [(s.op, str(s.cases), _names(s.implementations), counted(s.statuses), _last(s)) for s in summaries]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*_head(report), "", *lines, "", *conclusion(report)])


def _last(summary: OpSummary) -> str:
    if summary.figures or summary.worst is None:
        return summary.figures or "-"
    share, entry = summary.worst
    return f"{number(share):<8} {entry.id}"


def _head(report: Report) -> list[str]:
    run = report.run
    package = " ".join(filter(None, (run.plug_in.distribution, run.plug_in.version)))
    commit = f", commit {run.plug_in.git[:12]}{' (dirty)' if run.plug_in.dirty else ''}" if run.plug_in.git else ""
    return [
        f"backend {run.backend} ({package}{commit}) on {run.device.name}, {run.device.arch}",
        f"suite {run.suite_version}, specification {run.spec_version}, seed {run.seed}, "
        f"{len(report.cases)} cases in {run.seconds:.0f} s; "
        f"{len(report.not_applicable)} say nothing about this backend"
        + (f"; {len(report.not_run)} were not run" if report.not_run else ""),
    ]


def conclusion(report: Report) -> list[str]:
    """The verdict with its reasons."""
    verdict = report.verdict
    narrowed = f" ({report.run.only} only: no claim)" if report.run.only else ""
    no_claim = [] if verdict.is_claim or narrowed else [f"no claim about a device: {verdict.no_claim}"]
    if verdict.is_met:
        return [f"profile {verdict.profile}{narrowed}: met", *no_claim]
    lines = [f"profile {verdict.profile}{narrowed}: NOT met, for {len(verdict.reasons)} reasons", *no_claim]
    lines += [f"  {reason}" for reason in verdict.reasons[:REASONS_SHOWN]]
    if len(verdict.reasons) > REASONS_SHOWN:
        lines.append(f"  … and {len(verdict.reasons) - REASONS_SHOWN} more; --json and --html hold them all")
    failed = next((entry for entry in report.cases if _spoils(entry, verdict.reasons)), None)
    return [*lines, f"again: {failed.rerun}"] if failed is not None else lines


def _spoils(entry: Entry, reasons: Sequence[str]) -> bool:
    return any(reason.startswith(f"{entry.id}: ") for reason in reasons)


def _names(implementations: Mapping[str, int]) -> str:
    return next(iter(implementations)) if len(implementations) == 1 else counted(implementations)
