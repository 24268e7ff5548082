"""`make nightly`: what is too long for every change, and the report that is committed with it.

    python tests/nightly.py [JOB ...]     jobs by name, all by default; rewrites their rows in docs/reports/nightly.md

Each job but variants, which is `octavo conform --variants` and keeps its own report beside this one, is a selection of
tests run with OCTAVO_NIGHTLY=1: new random examples each time, and many more of them. How
many random histories the scheduler gets is $OCTAVO_NIGHTLY_HISTORIES (30,000 by default, 4 to 5 million steps).
"""

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "docs/reports/nightly.md"
VARIANTS = ROOT / "docs/reports/variants.json"
RESULTS = ROOT / "docs/reports/nightly.json"
HISTORIES = os.environ.get("OCTAVO_NIGHTLY_HISTORIES", "30000")

JOBS = {
    "scheduler": (
        f"{HISTORIES} random histories of scheduler and block manager",
        ["tests/sched/test_state_machine.py"],
    ),
    "variants": (
        "honest variants under profile core, 20 seeds, on two processes: no false alarm; resumes where it was left",
        ["--variants", "--profile", "core", "--seed", "100", "--seeds", "20", "--jobs", "2"],
    ),
    "conformance": ("the suite's own tests, with new examples", ["tests/conformance"]),
    "text": ("tokenisers, streamed text and sampling, with new examples", ["tests/text", "tests/sample"]),
    "load": ("hostile files and formats, with new examples", ["tests/load"]),
    "overload": ("2,000 requests at four times what the server bears", ["tests/serve/test_overload.py"]),
    "kills": (
        "50 times a process of a loaded server dies, at a random moment: no orphan, no file, no client that waits",
        ["tests/serve/test_kills.py"],
    ),
    "starts": ("four servers of two ranks start at once, five times", ["tests/serve/test_starts.py"]),
    "openapi": (
        "10,000 requests that schemathesis makes of the API's description: no 5xx, no answer unlike what it says",
        ["tests/serve/test_openapi.py"],
    ),
    "packages": ("the example packages and the guide, end to end", ["tests/packaging"]),
}


def main() -> int:
    """Run the jobs, keep their results, write the report. Returns 1 when a job failed."""
    names = sys.argv[1:] or list(JOBS)
    if unknown := set(names) - set(JOBS):
        sys.exit(f"no job {', '.join(sorted(unknown))}; there are {', '.join(JOBS)}")
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        results[name] = run(name)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        REPORT.write_text(report(results))
    return int(any(results[name]["exit_code"] for name in names))


def run(name: str) -> dict[str, str | int | float]:
    """One job's outcome."""
    what, paths = JOBS[name]
    command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", *paths]
    if name == "variants":
        command = [sys.executable, "-m", "octavo.core.cli.main", "conform", *paths, "--json", str(VARIANTS)]
    started = time.time()
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OCTAVO_NIGHTLY": "1"}, stdout=subprocess.PIPE, text=True
    )
    sys.stdout.write(done.stdout)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "what": what,
        "outcome": done.stdout.strip().splitlines()[-1].strip("= "),
        "exit_code": done.returncode,
        "minutes": round((time.time() - started) / 60, 1),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def report(results: dict[str, dict[str, str | int | float]]) -> str:
    """The page."""
    rows = [
        f"| {name} | {r['what']} | {r['outcome']} | {r['minutes']} | {r['commit']} | {r['date']} |"
        for name, r in results.items()
    ]
    machines = ", ".join(sorted({str(r["machine"]) for r in results.values()}))
    return "\n".join(
        [
            "# Nightly runs",
            "",
            f"Written by `make nightly`; each row is the job's latest run. Machine: {machines}.",
            "",
            "| job | what | outcome | minutes | commit | date |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
