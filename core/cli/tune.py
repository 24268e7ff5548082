"""Search a backend's launch parameters on the device that is here.

    octavo tune --backend NAME [--only KERNEL] [--out DIR]

Every set of parameters in the backend's tuning/*.toml is varied, one value at a time, as long as the workloads that it
serves get faster; files that change are written to DIR (default: tuning), each as soon as something of it is faster, so
that a search that ends early leaves what it had found. Measuring has a process of its own: parameters that break the
device end that process, and the search goes on in another. Look at the difference, run `octavo conform --backend NAME`
with it in place, and keep what both support.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import ConfigError

if TYPE_CHECKING:
    from octavo.core.backend.device import DeviceBackend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The backend, what of it, and where the files go."""
    parser.add_argument("--backend", metavar="NAME", required=True, help="as `octavo backends` lists them")
    parser.add_argument("--backend-option", metavar="KEY=VALUE", action="append", default=[], help="an option of it")
    parser.add_argument("--only", metavar="KERNEL", help="kernels whose name begins so")
    parser.add_argument("--out", metavar="DIR", default="tuning", help="where changed files go (default: tuning)")


def run(args: argparse.Namespace) -> int:
    """Search, and write what changed as it is found."""
    from octavo.core.backend.options import split_options
    from octavo.core.backend.registry import BackendRegistry, load_tune

    folder, options = _folder(args.out), split_options(args.backend_option)
    tune = load_tune(BackendRegistry.discover().choose(args.backend))
    written: list[str] = []

    def write(name: str, text: str) -> None:
        replace_file(folder / name, text)
        if name not in written:
            written.append(name)

    tune(functools.partial(open_device, args.backend, options), only=args.only, on_found=_print, write=write)
    for name in written:
        print(f"written: {folder / name}")
    if not written:
        print("nothing faster was found; no file is written")
    return 0


def open_device(backend: str, options: dict[str, str]) -> DeviceBackend:
    """The device, in the process that measures."""
    from octavo.core.backend.registry import BackendRegistry

    registry = BackendRegistry.discover()
    return registry.create(registry.choose(backend), options)


def replace_file(path: Path, text: str) -> None:
    """Whoever reads the file finds the old text or the new one, whole, whenever this process ends."""
    draft = path.with_name(f"{path.name}.unfinished")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


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
