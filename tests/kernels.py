"""`make kernels`: every kernel built ahead of time for both chips, judged, and compared with the committed figures.

    octavo conform --profile compile ──► build/compile-TARGET.json ─┬─ faults and regressions end it with 1
                                                                    └─ --write: docs/reports/kernels-TARGET.json and
                                                                                docs/kernels.md
A regression, of launch parameters that somebody gets unasked: registers begin to spill, products no longer run on the
chip's matrix units, or a kernel takes more than a tenth more registers. Figures of another Triton are not compared;
what is unfit for the chip by itself fails in any case. Needs no device.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "docs/reports"
PAGE = ROOT / "docs/kernels.md"
TARGETS = {"sm_90": "cuda", "gfx942": "rocm"}
MATRIX_UNITS = ("wgmma", "mfma")
MORE_REGISTERS = 1.1

Figures = dict[str, float]
Table = dict[str, Any]


def main() -> int:
    """Build, then check or write. Returns 1 for a fault or a regression."""
    parser = argparse.ArgumentParser(description="Kernels built ahead of time, against the committed figures.")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one")
    parser.add_argument("--write", action="store_true", help="make the committed figures and docs/kernels.md anew")
    args = parser.parse_args()
    found, code = {}, 0
    for target in args.target or TARGETS:
        found[target], met = built(target)
        code |= not met
    for target, table in found.items():
        file = REPORTS / f"kernels-{target}.json"
        if args.write:
            file.write_text(rendered(table))
        elif file.exists():
            faults, notes = compared(json.loads(file.read_text()), table)
            say(f"{target}: {line}" for line in notes + faults)
            code |= bool(faults)
        else:
            say([f"{target}: {file.relative_to(ROOT)} is missing; make kernels-write"])
            code = 1
    if args.write:
        tables = [json.loads(path.read_text()) for t in TARGETS if (path := REPORTS / f"kernels-{t}.json").exists()]
        PAGE.write_text(page(tables))
    return int(code)


def say(lines: Iterable[str]) -> None:
    """On stdout."""
    sys.stdout.writelines(f"{line}\n" for line in lines)


def built(target: str) -> tuple[Table, bool]:
    """The figures of every build, and whether all are fit for the chip."""
    backend, report = TARGETS[target], ROOT / f"build/compile-{target}.json"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "octavo.core.cli.main", "conform", "--backend", backend, "--profile", "compile"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([*command, "--target", target, "--json", str(report)], cwd=ROOT, env=environment, check=False)
    if not report.exists():
        sys.exit(f"octavo conform ended with {done.returncode} and without a report")
    cases = json.loads(report.read_text())["cases"]
    builds = {case["id"]: case["figures"] for case in cases if case["figures"]}
    return {"target": target, "triton": version("triton"), "builds": builds}, done.returncode == 0


def compared(known: Table, now: Table) -> tuple[list[str], list[str]]:
    """What has become worse, and what could not be compared."""
    if known["triton"] != now["triton"]:
        return [], [f"figures are of Triton {known['triton']} and this is {now['triton']}: not compared"]
    faults: list[str] = []
    notes: list[str] = []
    for name, figures in now["builds"].items():
        if not figures["is_default"]:
            continue
        before = known["builds"].get(name)
        if before is None or not before["is_default"]:
            notes.append(f"{name}: not in the table; make kernels-write")
            continue
        faults += [f"{name}: {what}" for what in worse(before, figures)]
    gone = [name for name, f in known["builds"].items() if f["is_default"] and name not in now["builds"]]
    return faults, notes + [f"{name}: in the table, and no build any more; make kernels-write" for name in gone]


def worse(before: Figures, now: Figures) -> list[str]:
    """In what a build has become worse, a line each."""
    found = []
    if now["spill_bytes"] and not before["spill_bytes"]:
        found.append(f"begins to spill registers ({now['spill_bytes']:.0f} bytes)")
    for unit in MATRIX_UNITS:
        if before.get(unit) and not now.get(unit):
            found.append(f"has lost its {unit} instructions")
    if now["registers"] > MORE_REGISTERS * before["registers"]:
        found.append(f"takes {now['registers']:.0f} registers instead of {before['registers']:.0f}")
    return found


def rendered(table: Table) -> str:
    """The table as JSON, a line per build."""
    lines = [f"  {json.dumps(name)}: {json.dumps(figures)}" for name, figures in sorted(table["builds"].items())]
    head = {key: value for key, value in table.items() if key != "builds"}
    return json.dumps(head)[:-1] + ', "builds": {\n' + ",\n".join(lines) + "\n}}\n"


# ----------------------------------------------------------------------------------------- docs/kernels.md


def page(tables: list[Table]) -> str:
    """The document."""
    return "\n".join([*HEAD, *(line for table in tables for line in chapter(table))])


HEAD = """# Kernels, as compiled

Written by `make kernels-write`, from what the compiler made of each kernel at the shapes of models that people run
(`core/backend/workloads`). No device was involved. Registers, spills, shared memory and instructions are read from the
compiled code. The limit is the roofline of the chip's data sheet: the longer of bytes over bandwidth and operations
over rate. The share of it is what a model of bytes in flight and busy units expects; it is to be laid beside the first
measurement (`octavo conform --profile perf`).

`make kernels` builds them again, and fails when an entry of this page begins to spill, loses its matrix instructions,
or takes a tenth more registers.

- *programs*: that a unit holds at once. *16 B*: loads and asynchronous copies of 16 bytes, and TMA copies.
- *small-pool*: the KV cache has less than 2 GiB, for which AMD's compiler makes another kernel.
- A merge or second pass is counted with its whole op's work, so that its own share means little.
""".splitlines()


def chapter(table: Table) -> list[str]:
    """One target."""
    builds: dict[str, Figures] = table["builds"]
    defaults = {name: f for name, f in sorted(builds.items()) if f["is_default"]}
    spilling = {name: f for name, f in sorted(builds.items()) if f["spill_bytes"] and not f["is_default"]}
    chips = [key.removeprefix("limit_us ") for key in next(iter(builds.values())) if key.startswith("limit_us ")]
    matrix = ["wgmma", "mma"] if table["target"].startswith("sm_") else ["mfma"]
    head = ["kernel", "registers", "spills", "shared KiB", "warps", "programs", *matrix, "16 B"]
    head += [*(f"µs at the limit, {chip.split()[-1]}" for chip in chips), "share expected"]
    return [
        "",
        f"## {table['target']}",
        "",
        f"Triton {table['triton']}; {len(defaults)} launches that somebody gets unasked, {len(builds)} builds in all.",
        "",
        row(head),
        row(["---", *("---:" for _ in head[1:])]),
        *(row(cells(name.removesuffix("-default"), f, matrix, chips)) for name, f in defaults.items()),
        "",
        "Entries that nobody gets unasked, and that spill (bytes a thread): "
        + (", ".join(f"`{name}` {f['spill_bytes']:.0f}" for name, f in spilling.items()) or "none")
        + ".",
    ]


def cells(name: str, f: Figures, matrix: list[str], chips: list[str]) -> list[str]:
    """A row of a chapter."""
    wide = sum(f.get(key, 0) for key in ("loads_16", "async_copies_16", "tma_copies", "lds_direct"))
    numbers = [f["registers"], f["spill_bytes"], round(f["shared_bytes"] / 1024), f["warps"], f["programs_per_unit"]]
    numbers += [*(f[unit] for unit in matrix), wide]
    limits = [f"{f[f'limit_us {chip}']:.4g}" for chip in chips]
    return [f"`{name}`", *(f"{n:.0f}" for n in numbers), *limits, f"{f['expected_share']:.0%}"]


def row(words: list[str]) -> str:
    """A line of a Markdown table."""
    return f"| {' | '.join(words)} |"


if __name__ == "__main__":
    sys.exit(main())
