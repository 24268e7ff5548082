"""The matrix in the documentation: a report in a few Markdown rows, written between two markers.

<!-- conformance matrix: cpu -->      one pair of markers per backend, put there by hand once
| op | runs on | cases | … |          everything between them is written here
<!-- end -->
"""

from __future__ import annotations

import re

from octavo.conformance.report.json import Report
from octavo.conformance.report.table import OpSummary, by_op, counted, number
from octavo.core.base.errors import ConfigError

HEADER = "| op | runs on | cases | status | worst share of its bound | axes |"
END = "<!-- end -->"


def begin(backend: str) -> str:
    """The marker before a backend's matrix."""
    return f"<!-- conformance matrix: {backend} -->"


def render(report: Report) -> str:
    """The matrix of a report."""
    run = report.run
    rows = [_row(report, summary) for summary in by_op(report.cases)]
    verdict = "met" if report.verdict.is_met else "NOT met"
    title = (
        f"Profile `{report.verdict.profile}`: **{verdict}**. {run.device.name}, {run.device.arch}; "
        f"{len(report.cases)} cases in {run.seconds:.0f} s, seed {run.seed}; suite {run.suite_version}, "
        f"must-pass hash `{run.must_pass.get(run.profile, 'none')}`."
    )
    return "\n".join([title, "", HEADER, re.sub(r"[^|]+", "---", HEADER), *rows])


def replaced(document: str, report: Report, name: str) -> str:
    """The document with the report's matrix in its place. Raises ConfigError when it has no place for it."""
    start = begin(report.run.backend)
    pattern = re.compile(f"{re.escape(start)}.*?{re.escape(END)}", re.DOTALL)
    if not pattern.search(document):
        raise ConfigError(f"{name} has no line {start} with a line {END} after it; add both where the matrix goes")
    return pattern.sub(lambda _: f"{start}\n{render(report)}\n{END}", document, count=1)


def _row(report: Report, summary: OpSummary) -> str:
    axes: dict[str, set[str]] = {}
    for entry in report.cases:
        if entry.op == summary.op:
            for axis, value in entry.parameters.items():
                axes.setdefault(axis, set()).add(value)
    worst = "exact" if summary.worst is None or summary.worst[0] == 0 else number(summary.worst[0])
    covered = ", ".join(f"{axis} {len(values)}" for axis, values in axes.items() if len(values) > 1)
    cells = (
        f"`{summary.op}`",
        counted(summary.implementations),
        str(summary.cases),
        counted(summary.statuses),
        worst,
        covered,
    )
    return f"| {' | '.join(cells)} |"
