"""Search a backend's launch parameters on the device that is here.

    octavo tune --backend NAME [--only KERNEL] [--out DIR]

Every set of parameters in the backend's tuning/*.toml is varied, one value at a time, as long as the workloads that it
serves get faster; files that change are written to DIR (default: tuning). Look at the difference, run `octavo conform
--backend NAME` with it in place, and keep what both support.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.core.base.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The backend, what of it, and where the files go."""
    parser.add_argument("--backend", metavar="NAME", required=True, help="as `octavo backends` lists them")
    parser.add_argument("--backend-option", metavar="KEY=VALUE", action="append", default=[], help="an option of it")
    parser.add_argument("--only", metavar="KERNEL", help="kernels whose name begins so")
    parser.add_argument("--out", metavar="DIR", default="tuning", help="where changed files go (default: tuning)")


def run(args: argparse.Namespace) -> int:
    """Search, and write what changed."""
    from octavo.core.backend.options import split_options
    from octavo.core.backend.registry import BackendRegistry, load_tune

    folder = _folder(args.out)
    registry = BackendRegistry.discover()
    info = registry.choose(args.backend)
    tune = load_tune(info)
    backend = registry.create(info, split_options(args.backend_option))
    try:
        files = tune(backend, only=args.only, on_found=_print)
    finally:
        backend.close()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
        print(f"written: {folder / name}")
    if not files:
        print("nothing faster was found; no file is written")
    return 0


def _folder(out: str) -> Path:
    """Made before the search, which takes long. Raises ConfigError."""
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} can't be made: {error.strerror}; name another folder", field="out") from None
    return Path(out)


def _print(found: Any) -> None:
    served = ", ".join(found.workloads) or "no workload asks for it"
    print(f"{found.before.kernel:<24}{found.gain:>6.2f}x  {served}", flush=True)
