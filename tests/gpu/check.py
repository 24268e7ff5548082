"""`make gpu-check BACKEND=cuda`: what a device alone can settle, in eight minutes, with one report at the end.

    facts ─► compile ─► conform ─► perf ─► tokens ─► throughput       a process each, with a time of its own
      └─────────┴──────────┴────────┴────────┴───────────┴──► build/gpu-check/: report.json, table.txt, a log per step

No step stops the others: one that crashes, hangs or is late costs its own row. Needs no network and no installation:
the interpreter's torch and triton, this repository, and the wheels that `make gpu-wheels` puts into build/wheels where
the interpreter lacks a module. With $OUT set, everything is copied there. --small: every step at a size for
interpreters, so that the first run on a device is not the first run of this file.

Exit code 0: every step is ok, or was cut short by its time without a fault; else 1.
"""

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/gpu-check"
sys.path.insert(0, str(ROOT))  # a script's own folder is all that stands there

from tests.gpu import summary  # noqa: E402 - see above

Found = dict[str, Any]

GRACE_S = 10.0
"""Beyond its budget, what a step has to end what it is at."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One row of the report.

    Attributes:
        words: of the command line, after the interpreter.
        budget_s: after which it should end by itself. GRACE_S later it is ended.
        wants: which fact must be there; without it the step is skipped.
    """

    name: str
    words: list[str]
    budget_s: float
    wants: str = ""


def main() -> int:
    """Run the steps, write the report, print the table."""
    parser = argparse.ArgumentParser(description="What a device alone can settle, in eight minutes.")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--jobs", default="8", help="processes that share the conformance cases")
    parser.add_argument("--only", action="append", help="this step; may be repeated")
    parser.add_argument("--small", action="store_true", help="sizes for an interpreter")
    args = parser.parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    environment = surroundings()
    found: Found = {"backend": args.backend, "small": args.small, "started": time.strftime("%FT%TZ", time.gmtime())}
    began, rows = time.monotonic(), {}
    for step in steps(args.backend, args.jobs, small=args.small):
        if args.only and step.name not in (*args.only, "facts"):
            continue
        facts = rows.get("facts", {}).get("result") or {}
        if step.wants and not facts.get(step.wants):
            rows[step.name] = {"status": "skipped", "seconds": 0.0, "said": f"no {step.wants}", "result": None}
            continue
        rows[step.name] = run(step, environment)
        keep(found, rows, began)
        copy_out()
    sys.stdout.write(keep(found, rows, began))
    copy_out()
    return int(any(row["status"] not in ("ok", "cut", "skipped") for row in rows.values()))


def copy_out() -> None:
    """What there is so far, to where it outlives the machine."""
    if out := os.environ.get("OUT"):
        shutil.copytree(FOLDER, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("site", "models"))


def steps(backend: str, jobs: str, *, small: bool) -> list[Step]:
    """All of them: 480 s together at the most, grace included, on a device."""
    conform = ["-m", "octavo", "conform", "--backend", backend]
    core = ["--profile", "core", "--jobs", jobs, "--timeout", "120", "--json", str(FOLDER / "core.json")]
    perf = ["--profile", "perf", "--json", str(FOLDER / "perf.json")]
    compiled = ["--profile", "compile", "--json", str(FOLDER / "compile.json")]
    if small:
        perf += ["--only", "perf.rms_norm/norm-m64"]
        compiled += ["--only", "rms_norm"]
    size = ["--small"] if small else []
    here = "tests/gpu"
    return [
        Step("facts", [f"{here}/facts.py", "--backend", backend], 25),
        Step("compile", [*conform, *compiled], 45, wants="builds"),
        Step("conform", [*conform, *core, "--budget", "60" if small else "150"], 60 if small else 150),
        Step("perf", [*conform, *perf, "--beside", str(FOLDER / "core.json"), "--budget", "50"], 50),
        Step("tokens", [f"{here}/tokens.py", "--backend", backend, *size], 90 if not small else 300),
        Step("throughput", [f"{here}/throughput.py", "--backend", backend, *size], 60 if not small else 300),
    ]


def run(step: Step, environment: dict[str, str]) -> Found:
    """One step in a session of its own, ended with all its processes when it is late."""
    log, answer = FOLDER / f"{step.name}.log", FOLDER / f"{step.name}.json"
    changed = dict(environment)
    if step.name == "compile":
        changed.pop("TRITON_INTERPRET", None)
    report = {"compile": "compile.json", "conform": "core.json", "perf": "perf.json"}.get(step.name, answer.name)
    words = step.words if step.name != "perf" or (FOLDER / "core.json").exists() else without(step.words, "--beside")
    sys.stderr.write(f"{step.name}: up to {step.budget_s:.0f} s\n")
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=changed, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout=step.budget_s + GRACE_S)
            said = "" if code == 0 else f"exit code {code}" if code > 0 else f"signal {-code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, said = process.wait(), f"no end after {step.budget_s + GRACE_S:.0f} s"
    seconds = time.monotonic() - began
    file = FOLDER / report
    result = json.loads(file.read_text()) if file.exists() and file.stat().st_size else None
    if result is None:
        said = f"{said or 'no report'}: {last_line(log)}"
    status = "failed" if code or result is None else "ok"
    if status == "failed" and result is not None and summary.is_cut_only(result):
        status = "cut"
    return {"status": status, "seconds": round(seconds, 1), "said": said, "result": result}


def without(words: list[str], flag: str) -> list[str]:
    """A command line without a flag and its value."""
    at = words.index(flag)
    return [*words[:at], *words[at + 2 :]]


def keep(found: Found, rows: dict[str, Found], began: float) -> str:
    """Write what is known so far, and return it as a table: what ends this process costs no row that is there."""
    short = {name: {**row, "result": summary.shortened(name, row["result"])} for name, row in rows.items()}
    found |= {"seconds": round(time.monotonic() - began, 1), "steps": short}
    (FOLDER / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    text = summary.table(found)
    (FOLDER / "table.txt").write_text(text)
    return text


def surroundings() -> dict[str, str]:
    """The environment of every step: this tree, and the wheels that fit this interpreter."""
    path = [str(ROOT / "src"), str(ROOT), *unpacked(ROOT / "build/wheels", FOLDER / "site")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def unpacked(wheels: Path, site: Path) -> list[str]:
    """A folder with the modules that this interpreter lacks, from wheels that fit it; nothing when none is lacking."""
    tag, is_there = f"cp{sys.version_info[0]}{sys.version_info[1]}", False
    for wheel in sorted(wheels.glob("*.whl")):
        name, _, python, *_ = wheel.name.split("-")
        if python == tag and not installed(name):
            zipfile.ZipFile(wheel).extractall(site)
            is_there = True
    return [str(site)] if is_there else []


def installed(name: str) -> bool:
    """Whether this interpreter has a module of the name."""
    import importlib.util

    return importlib.util.find_spec(name) is not None


def last_line(log: Path) -> str:
    """What a step said last."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "nothing was said"


if __name__ == "__main__":
    sys.exit(main())
