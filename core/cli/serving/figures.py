"""Samples as figures: the report of `octavo bench serve`, for people and as JSON.

A failed request is counted by its cause and is in no other figure. Percentiles are interpolated between neighbours.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.core.base.errors import ConfigError
from octavo.core.base.names import did_you_mean
from octavo.core.cli.serving.load import Client, Outcome
from octavo.core.cli.serving.probe import Sample

Report = dict[str, Any]

PERCENTILES = (50, 90, 95, 99)
SLOS = ("ttft", "tpot", "e2e")
BUSY_SHARE, LATE_MS = 0.8, 10.0
"""Of a core, and of the event loop's 99th percentile: beyond either, the client measures itself."""

CACHED_SHARE = 0.05
"""Of the prompts' tokens: beyond it, a reader should know that the server did not compute them."""


def read_slos(texts: Iterable[str]) -> dict[str, float]:
    """--slo NAME=MS, as milliseconds by name.

    Raises:
        ConfigError: an unknown name, or no number.
    """
    slos = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in SLOS:
            raise ConfigError(f"--slo {text!r}: unknown figure {name!r}{did_you_mean(name, SLOS)}", field="slo")
        try:
            slos[name] = float(value)
        except ValueError:
            slos[name] = math.nan
        if not slos[name] > 0:
            raise ConfigError(f"--slo {text!r}: give NAME=MILLISECONDS, such as ttft=500", field="slo")
    return slos


def report_of(outcome: Outcome, slos: Mapping[str, float]) -> Report:
    """Every figure of one load; times in milliseconds, by name."""
    done = [sample for sample in outcome.samples if sample.error is None]
    errors = Counter(sample.error for sample in outcome.samples if sample.error is not None)
    out_tokens = sum(sample.tokens for sample in done)
    in_tokens = sum(sample.in_tokens or 0 for sample in done)
    seconds = outcome.seconds
    report: Report = {
        "seconds": round(seconds, 4),
        "completed": len(done),
        "failed": sum(errors.values()),
        "errors": dict(errors.most_common()),
        "in_tokens": in_tokens,
        "out_tokens": out_tokens,
        "cached_tokens": sum(sample.cached_tokens or 0 for sample in done),
        "requests_per_s": round(len(done) / seconds, 3),
        "out_tps": round(out_tokens / seconds, 2),
        "total_tps": round((in_tokens + out_tokens) / seconds, 2),
        "connect_ms": _spread(sample.connected - sample.begun for sample in done),
        "ttft_ms": _spread(sample.ttft for sample in done),
        "tpot_ms": _spread(tpot for sample in done if (tpot := sample.tpot) is not None),
        "itl_ms": _spread(gap for sample in done for gap in sample.gaps),
        "e2e_ms": _spread(sample.e2e for sample in done),
    }
    if slos:
        good = sum(_is_good(sample, slos) for sample in done)
        share = good / len(outcome.samples)
        report["goodput"] = {"slo_ms": dict(slos), "requests_per_s": round(good / seconds, 3), "share": round(share, 4)}
    report["client"] = _client(outcome.client, outcome.samples, seconds)
    report["notes"] = _notes(done, report)
    return report


def summary(report: Report) -> str:
    """The report as lines for a terminal."""
    failed = f", {report['failed']} failed ({_counts(report['errors'])})" if report["failed"] else ""
    lines = [
        f"requests    {report['completed']} done{failed} in {report['seconds']:.2f} s",
        f"throughput  {report['requests_per_s']} requests/s, {report['out_tps']} tokens/s out, "
        f"{report['total_tps']} in and out",
        " " + "".join(f"{head:>10}" for head in ("", "mean", *(f"p{p}" for p in PERCENTILES), "max")),
    ]
    for name in ("connect_ms", "ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        if spread := report[name]:
            lines.append(f"{name:<11}" + "".join(f"{value:>10.2f}" for value in spread.values()))
    if goodput := report.get("goodput"):
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["slo_ms"].items())
        lines.append(f"goodput     {goodput['requests_per_s']} requests/s, {goodput['share']:.1%} within {limits}")
    client = report["client"]
    lines.append(
        f"client      {client['cpu_share']:.0%} of a core, {client['cpu_us_per_event']:.0f} us an event, "
        f"events at most {client['lag_ms'].get('p99', 0):.2f} ms late (p99)"
    )
    return "\n".join([*lines, *(f"note: {note}" for note in report["notes"])])


def row(sample: Sample) -> Report:
    """One request, for --details."""
    return {
        "error": sample.error,
        "in_tokens": sample.in_tokens,
        "out_tokens": sample.tokens,
        "ttft_ms": round(sample.ttft * 1e3, 3),
        "e2e_ms": round(sample.e2e * 1e3, 3),
        "itl_ms": [round(gap * 1e3, 3) for gap in sample.gaps],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, interpolated between the two neighbours of its rank."""
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    """Mean, percentiles and maximum, in milliseconds; empty of nothing."""
    ordered = sorted(1e3 * value for value in seconds)
    if not ordered:
        return {}
    found = {"mean": statistics.fmean(ordered)}
    found |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {name: round(value, 3) for name, value in (found | {"max": ordered[-1]}).items()}


def _is_good(sample: Sample, slos: Mapping[str, float]) -> bool:
    """Whether every limit is kept; a reply of one token has no tpot to exceed."""
    return all(1e3 * (getattr(sample, name) or 0.0) <= limit for name, limit in slos.items())


def _client(client: Client, samples: Sequence[Sample], seconds: float) -> Report:
    events = sum(sample.num_events for sample in samples)
    return {
        "cpu_share": round(client.cpu_seconds / seconds, 3),
        "cpu_us_per_event": round(1e6 * client.cpu_seconds / max(1, events), 1),
        "lag_ms": _spread(client.lags),
        "late_ms": _spread(client.lates),
        "waited_ms": _spread(client.waits),
    }


def _notes(done: Sequence[Sample], report: Report) -> list[str]:
    """What a reader of the figures should know."""
    notes, client = [], report["client"]
    if client["cpu_share"] > BUSY_SHARE or client["lag_ms"].get("p99", 0.0) > LATE_MS:
        notes.append("the client came late to its events: latencies hold some of that; use another, idle machine")
    if any(sample.out_tokens is None for sample in done):
        notes.append("the server sends no usage; tokens are counted as events with text")
    if report["cached_tokens"] > CACHED_SHARE * report["in_tokens"]:
        share = report["cached_tokens"] / report["in_tokens"]
        notes.append(f"{share:.0%} of the prompts' tokens were in the server's cache: they begin alike, or came before")
    return notes


def _counts(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{cause}: {count}" for cause, count in errors.items())
