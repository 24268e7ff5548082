"""`make conform-tiny` and `make conform-interpret`: the GPU backends' numbers, without a GPU, by Triton's interpreter.

    octavo conform --backend cuda|rocm --jobs 2, TRITON_INTERPRET=1 ──► build/PROFILE-BACKEND.json
                                                                └── --write: docs/reports/interpreted-BACKEND.json

What is written is a summary by op: how cases ended, the worst share of a bound and its case, and seconds. An
interpreter says that a kernel computes what it should, and nothing about a device: no run here is a claim.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.summary import GOOD, by_op

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("cuda", "rocm")
SLOWEST = 20


def main() -> int:
    """Run the profile on each backend. Returns 1 when one does not meet it."""
    parser = argparse.ArgumentParser(description="The GPU backends' numbers by Triton's interpreter.")
    parser.add_argument("profile", choices=("tiny", "tiny-full"))
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="only this one")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--write", action="store_true", help="write docs/reports/interpreted-BACKEND.json")
    args = parser.parse_args()
    code = 0
    for backend in args.backend or BACKENDS:
        report, met = run(backend, args.profile, args.jobs)
        code |= not met
        if args.write:
            text = json.dumps(summary(report), indent=1, ensure_ascii=False) + "\n"
            (ROOT / f"docs/reports/interpreted-{backend}.json").write_text(text)
    return int(code)


def run(backend: str, profile: str, jobs: str) -> tuple[dict[str, Any], bool]:
    """The report, and whether the profile is met."""
    file = ROOT / f"build/{profile}-{backend}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "octavo.core.cli.main", "conform", "--backend", backend, "--profile", profile]
    # One thread each: they share the cores as it is, and the tensors are small.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([*command, "--jobs", jobs, "--json", str(file)], cwd=ROOT, env=environment, check=False)
    if not file.exists():
        sys.exit(f"octavo conform ended with {done.returncode} and without a report")
    return json.loads(file.read_text()), done.returncode == 0


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """A report in a hundredth of its size."""
    run, cases = report["run"], report["cases"]
    slowest = sorted(cases, key=lambda case: -case["seconds"])[:SLOWEST]
    return {
        "profile": run["profile"],
        "backend": run["backend"],
        "device": run["device"]["name"],
        "commit": run["plug_in"]["git"],
        "dirty": run["plug_in"]["dirty"],
        "torch": run["software"]["torch"],
        "triton": run["software"]["triton"],
        "started": run["started"],
        "seed": run["seed"],
        "seconds": run["seconds"],
        "must_pass": run["must_pass"][run["profile"]],
        "met": report["verdict"]["is_met"],
        "cases": len(cases),
        "not_applicable": len(report["not_applicable"]),
        "ops": by_op(cases),
        "not_own": sorted({f"{c['op']}: {c['detail']}" for c in cases if c["implementation"] == "fallback"}),
        "faults": {case["id"]: f"{case['status']}: {case['detail']}" for case in cases if case["status"] not in GOOD},
        "slowest_s": {case["id"]: round(case["seconds"], 1) for case in slowest},
    }


if __name__ == "__main__":
    sys.exit(main())
