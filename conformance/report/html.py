"""A report as one page that needs nothing else: no script, no font, no file beside it; light or dark as the reader is.

    report ──► per op: axis × value, each with its worst share of the bound     page.html, a jinja2 template
           ├─► per op of builds or measurements: case × figure, instead
           └─► the worst cases, and what is not a pass, with the commands that run them again

Everything is escaped: names and details come from a plug-in.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from octavo.conformance.harness.result import BAD, Status
from octavo.conformance.report.figures import columns, plain
from octavo.conformance.report.json import Entry, Report
from octavo.conformance.report.table import OpSummary, by_op, counted, number

WORST_SHOWN = 20
FAILED_SHOWN = 200


@dataclass(frozen=True)
class Cell:
    """All cases of one op with one value on one axis.

    Attributes:
        mood: "bad", "gap" (declared), "fallback", or "good".
        worst: the largest share of a limit; None without figures.
    """

    value: str
    cases: int
    mood: str
    worst: float | None


@dataclass(frozen=True)
class Block:
    """One op's part.

    Attributes:
        axes: axis -> cells, in the order of the grid.
        columns: figure -> its title, of builds and measurements.
        entries: all of the op's.
    """

    summary: OpSummary
    axes: dict[str, list[Cell]]
    columns: dict[str, str]
    entries: Sequence[Entry]


def render(report: Report) -> str:
    """The page."""
    template = importlib.resources.files("octavo.conformance.report").joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": number, "counted": counted, "plain": plain, "mood": lambda entry: mood([entry])}
    ranked = sorted((e for e in report.cases if e.worst is not None), key=lambda e: -(e.worst or 0.0))
    return environment.from_string(template).render(
        report=report,
        run=report.run,
        blocks=blocks(report.cases),
        has_figures=any(entry.figures for entry in report.cases),
        worst=ranked[:WORST_SHOWN],
        failed=[e for e in report.cases if mood([e]) in ("bad", "gap")][:FAILED_SHOWN],
    )


def blocks(entries: Sequence[Entry]) -> list[Block]:
    """The matrix, op by op."""
    result = []
    for summary in by_op(entries):
        mine = [entry for entry in entries if entry.op == summary.op]
        names = dict.fromkeys(axis for entry in mine for axis in entry.parameters)
        result.append(Block(summary, {axis: _cells(axis, mine) for axis in names}, columns(mine), mine))
    return result


def mood(entries: Sequence[Entry]) -> str:
    """The worst of what these cases came to."""
    statuses = {entry.status for entry in entries}
    if statuses & BAD:
        return "bad"
    if statuses & {Status.XFAIL, Status.WAIVED, Status.UNSUPPORTED}:
        return "gap"
    return "fallback" if Status.FALLBACK in statuses else "good"


def _cells(axis: str, entries: Sequence[Entry]) -> list[Cell]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if axis in entry.parameters:
            groups.setdefault(entry.parameters[axis], []).append(entry)
    return [
        Cell(
            value=value,
            cases=len(group),
            mood=mood(group),
            worst=max((worst for entry in group if (worst := entry.worst) is not None), default=None),
        )
        for value, group in sorted(groups.items(), key=lambda item: _natural(item[0]))
    ]


def _natural(value: str) -> tuple[int, float, str]:
    """Numbers by size, before words."""
    try:
        return 0, float(value), ""
    except ValueError:
        return 1, 0.0, value
