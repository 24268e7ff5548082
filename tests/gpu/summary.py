"""What of a step's result goes into the report of `make gpu-check`, and the table at its end. Standard library only."""

from __future__ import annotations

import collections
import math
from typing import Any

Found = dict[str, Any]

GOOD = ("pass", "fallback", "xfail", "waived")
SLOWEST = 10
FAULTS_SHOWN = 40


def is_cut_only(report: Found) -> bool:
    """Whether a report of `octavo conform` is unmet only because its time was spent."""
    if "verdict" not in report:
        return False
    reasons = report["verdict"]["reasons"]
    return bool(report["not_run"]) and len(reasons) == 1 and "cases were not run" in reasons[0]


def shortened(step: str, result: Found | None) -> Found | None:
    """A conform report by op, with faults and the slowest cases; other results as they are."""
    if result is None or "cases" not in result:
        return result
    cases = result["cases"]
    slowest = sorted(cases, key=lambda case: -case["seconds"])[:SLOWEST]
    bad = [case for case in cases if case["status"] not in GOOD]
    return {
        "verdict": {**result["verdict"], "reasons": result["verdict"]["reasons"][:FAULTS_SHOWN]},
        "device": result["run"]["device"],
        "software": result["run"]["software"],
        "seed": result["run"]["seed"],
        "seconds": result["run"]["seconds"],
        "ops": by_op(cases),
        "faults": [{key: case[key] for key in ("id", "status", "detail", "rerun")} for case in bad[:FAULTS_SHOWN]],
        "slowest": {case["id"]: case["seconds"] for case in slowest},
        "not_run": result["not_run"],
        **({"figures": {c["id"]: c["figures"] for c in cases if c["figures"]}} if step != "conform" else {}),
    }


def by_op(cases: list[Found]) -> Found:
    """Op -> how its cases ended, the worst share of a bound with its case, and seconds."""
    groups: dict[str, list[Found]] = {}
    for case in cases:
        groups.setdefault(case["op"], []).append(case)
    return {op: _summed(group) for op, group in groups.items()}


def _summed(cases: list[Found]) -> Found:
    worst = max(cases, key=_worst)
    return {
        "cases": len(cases),
        "status": dict(collections.Counter(case["status"] for case in cases)),
        "worst": round(_worst(worst), 4) if math.isfinite(_worst(worst)) else "inf",  # JSON has no infinity
        "worst_case": worst["id"],
        "seconds": round(sum(case["seconds"] for case in cases), 2),
    }


def _worst(case: Found) -> float:
    return max((float(case[key]) for key in ("share", "rms", "gain") if case[key] is not None), default=0.0)


def table(found: Found) -> str:
    """The report on a screen."""
    rows = [("step", "outcome", "s", "what")]
    for name, row in found["steps"].items():
        what = row["said"] if row["result"] is None else LINES[name](row["result"])
        rows.append((name, row["status"], f"{row['seconds']:.0f}", what))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3]]).rstrip() for row in rows]
    head = f"gpu-check of backend {found['backend']}, {found['started']}, {found['seconds']:.0f} s"
    return "\n".join([head, *lines, *faults(found), ""])


def faults(found: Found) -> list[str]:
    """The first faults of every step."""
    lines = []
    for name, row in found["steps"].items():
        result = row["result"] or {}
        for fault in result.get("faults", [])[:6]:
            text = fault if isinstance(fault, str) else f"{fault['id']}: {fault['status']}: {fault['detail']}"
            lines.append(f"  {name}: {text[:200]}")
    return lines


def _facts(result: Found) -> str:
    missing = f", MISSING {' '.join(result['missing'])}" if result["missing"] else ""
    return f"{result.get('device', 'no device')}, torch {result['torch']}, triton {result['triton']}{missing}"


def _conform(result: Found) -> str:
    statuses: collections.Counter[str] = collections.Counter()
    for op in result["ops"].values():
        statuses.update(op["status"])
    counted = ", ".join(f"{count} {status}" for status, count in statuses.most_common())
    left = f"; {len(result['not_run'])} not run" if result["not_run"] else ""
    return f"{counted or 'nothing'}{left}; {'met' if result['verdict']['is_met'] else 'NOT met'}"


def _perf(result: Found) -> str:
    shares = {name.removeprefix("perf."): f.get("share_of_limit") for name, f in result["figures"].items()}
    known = {name: share for name, share in shares.items() if share is not None}
    best = sorted(known.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {share:.0%}" for name, share in [*best[:3], *best[3:][-3:]])
    return f"{len(result['figures'])} timed, best and worst: {shown or 'none'}{_left(result)}"


def _left(result: Found) -> str:
    return f"; {len(result['not_run'])} not run" if result["not_run"] else ""


def _tokens(result: Found) -> str:
    return "; ".join(result["lines"])


def _throughput(result: Found) -> str:
    return ", ".join(f"{name} {run['out_tokens_per_s']:.0f} tokens/s" for name, run in result["runs"].items())


LINES = {
    "facts": _facts, "compile": _conform, "conform": _conform, "perf": _perf,
    "tokens": _tokens, "throughput": _throughput,
}  # fmt: skip
