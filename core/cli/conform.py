"""Tell whether a backend's numbers are right: run the conformance suite on it.

    octavo conform --backend NAME --profile core --json FILE --html FILE    exit code 0 only when the profile is met
    octavo conform list [--profile P] [--only X]                            the cases, and the profiles
    octavo conform verify REPORT [--share 0.1]                              replay a random share of a report's cases
    octavo conform matrix REPORT DOCUMENT                                   write a report's matrix into a document
    octavo conform schema                                                   the JSON schema of reports
    octavo conform --mutants                                                every broken backend must be caught
    octavo conform --variants                                               every honest variant must pass

A profile is a named set of cases (core: what every backend must pass); the profiles model and engine run tiny models
through the backend and through the engine, compile builds kernels for a chip that need not be here, and perf times the
backend against its device's measured limits. --only takes an op (gemm), a case
(gemm.exact/float32-m17-n48-k100) or the beginning of its name (gemm.exact/). The seed is fresh unless given.
"""

from __future__ import annotations

import argparse
import importlib

from octavo.core.cli.interrupt import quiet_imports

SUITE = "octavo.conformance.command"
"""Found by name: the suite stands above the command line, and an installation may leave it out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, what to run, and where the report goes."""
    parser.add_argument("words", metavar="[ACTION ...]", nargs="*", help="list, verify, matrix or schema; see above")
    run = parser.add_argument_group("what to run")
    run.add_argument(
        "--backend", metavar="NAME", default="auto", help="as `octavo backends` lists them (default: auto)"
    )
    run.add_argument("--backend-option", metavar="KEY=VALUE", action="append", default=[], help="an option of it")
    run.add_argument("--profile", metavar="NAME", help="set of cases (default: core; with --only: full)")
    run.add_argument("--only", metavar="NAME", help="an op, a case, or the beginning of a case's name")
    run.add_argument("--seed", metavar="N", help="of everything drawn (default: fresh, and in the report)")
    run.add_argument("--target", metavar="ARCH", help="of --profile compile: the chip (default: the backend's own)")
    run.add_argument("--beside", metavar="REPORT", help="of --profile perf: the core report of the same plug-in")
    run.add_argument("--timeout", metavar="SECONDS", help="that every case may take, instead of its own limit")
    run.add_argument("--strict-backend", action="store_true", help="no op may fall back to the reference")
    run.add_argument("--jobs", metavar="N", help="processes that share the work (default: 1; compile: one per core)")
    run.add_argument("--budget", metavar="SECONDS", help="begin no case later than this, and the small ones first")
    run.add_argument("--in-process", action="store_true", help="no worker process: quicker, but a crash ends it all")
    run.add_argument("--mutants", action="store_true", help="run the mutation gate instead")
    run.add_argument("--variants", action="store_true", help="run the false-alarm gate instead")
    run.add_argument("--seeds", metavar="N", help="of --variants: how many seeds (default: 3)")
    run.add_argument("--share", metavar="X", help="of verify: how much of the report is replayed (default: 0.1)")
    reports = parser.add_argument_group("reports")
    reports.add_argument("--json", metavar="FILE", help="write the report as JSON")
    reports.add_argument("--html", metavar="FILE", help="write the report as one page that needs nothing else")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: the profile is met, the report holds, or every mutant is caught; else 1."""
    with quiet_imports():
        suite = importlib.import_module(SUITE)
    code: int = suite.run(args)
    return code
