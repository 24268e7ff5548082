"""The report as a file: JSON whose schema is checked in (schema.json) and versioned.

    Report ── run              what was run, on what, with which seed; nothing else is needed to run it again
           ├─ verdict          of the profile asked for
           ├─ cases            one entry each, in the suite's order
           ├─ not_applicable   case -> why it says nothing about this backend
           └─ not_run          cases that the run's budget left no time for

JSON has no infinity: an error in the exact lane, or one that isn't finite, is the text "inf". Unknown fields are
refused, so that a report of another schema is never half understood. `octavo conform schema` prints the schema.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from octavo.conformance.facts import Facts
from octavo.conformance.harness.result import CaseResult, Implementation, Status
from octavo.conformance.provenance import PlugIn, Software
from octavo.core.base.errors import ConfigError

SCHEMA_VERSION = 1

Figure = float | Literal["inf"] | None
"""A share of a limit: ≤ 1 passes; None where the lane has no such figure."""


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it ran on. count: ranks of the largest group that the run formed, each of which has a device."""

    name: str
    arch: str
    count: int
    total_memory_bytes: int


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was run.

    Attributes:
        must_pass: profile -> hash of its cases in this suite.
        only: the op, case or prefix to which the profile was narrowed; empty for all of it.
        options: of `--backend-option`.
        isolated: cases ran in a process of their own.
        started: UTC, ISO 8601.
        seconds: of the whole run.
    """

    suite_version: int
    spec_version: int
    must_pass: dict[str, str]
    profile: str
    only: str
    seed: int
    backend: str
    options: dict[str, str]
    isolated: bool
    started: str
    seconds: float
    plug_in: PlugIn
    software: Software
    device: Device
    capabilities: Facts


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether the profile is met.

    Attributes:
        is_claim: the whole profile was run, and it says something about a device.
        no_claim: why it does not; empty where it does.
        reasons: why it is not met, a line per case.
    """

    profile: str
    is_met: bool
    is_claim: bool
    reasons: list[str]
    no_claim: str = ""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case.

    Attributes:
        id: its name.
        parameters: its point on the grid's axes.
        share: the worst element's error, as a share of its bound.
        rms, gain: as shares of their limits.
        plain: rms error over that of a plain implementation in the same dtype.
        worst_output, worst_index: where `share` was found.
        ran: "op:implementation" of everything that was bound.
        rerun: the command line that runs this case alone, with this seed.
        figures: of profiles `compile` and `perf`: what a build or a measurement gave, by name.
    """

    id: str
    op: str
    parameters: dict[str, str]
    lanes: list[str]
    status: Status
    implementation: Implementation
    ran: list[str]
    detail: str
    share: Figure
    rms: Figure
    gain: Figure
    plain: Figure
    worst_output: str
    worst_index: list[int]
    seconds: float
    rerun: str
    figures: dict[str, float] = {}

    @property
    def worst(self) -> float | None:
        """The largest of the shares; None when the case has no figure."""
        figures = [float(f) for f in (self.share, self.rms, self.gain) if f is not None]
        return max(figures, default=None)


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's picture."""

    schema_version: int
    run: Run
    verdict: Verdict
    cases: list[Entry]
    not_applicable: dict[str, str]
    not_run: list[str] = []


def entry(result: CaseResult) -> Entry:
    """A judged case as the report keeps it."""
    plains = [f.plain for f in result.findings if f.plain is not None]
    return Entry(
        id=result.name,
        op=result.op,
        parameters=result.axes,
        lanes=list(result.lanes),
        status=result.status,
        implementation=result.implementation,
        ran=result.ops,
        detail=result.detail,
        share=figure(result.share),
        rms=figure(result.rms),
        gain=figure(result.gain),
        plain=figure(max(plains, default=None)),
        worst_output=result.worst_output,
        worst_index=list(result.worst_index),
        seconds=round(result.seconds, 4),
        rerun=result.rerun,
        figures=result.figures,
    )


def figure(value: float | None) -> Figure:
    """A number as JSON can hold it."""
    return value if value is None or math.isfinite(value) else "inf"


def encode(report: Report) -> bytes:
    """The file's bytes, indented, one newline at the end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def decode(data: bytes, *, source: str = "the report") -> Report:
    """A report from a file's bytes. Raises ConfigError when it isn't one of this schema."""
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"{source} has schema version {version}, not {SCHEMA_VERSION}: read it with the Octavo that made it",
                field="report",
            )
        return msgspec.json.decode(data, type=Report)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source} is no report of `octavo conform --json`: {error}", field="report") from None


class _Version(msgspec.Struct):
    schema_version: int


def schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    return msgspec.json.schema(Report) | {"title": f"Octavo conformance report, schema {SCHEMA_VERSION}"}
