"""Check this machine: what Octavo found, what is missing, and how to mend it. Loads no model."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

from octavo.core.base.host import host_memory, usable_cores
from octavo.core.base.units import format_bytes

OLDEST_PYTHON = (3, 11)
SMALL_MEMORY_BYTES = 2 << 30
_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?[^;]*?(?:>=\s*([\d.]+))?[^;]*(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?"
)


class Finding(NamedTuple):
    """One thing looked at. `remedy` is empty where all is well; only a `fatal` one keeps Octavo from running."""

    subject: str
    detail: str
    remedy: str = ""
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""


def run(args: argparse.Namespace) -> int:
    """Print every finding; exit 1 when one of them is fatal."""
    fatal = False
    for check in _CHECKS:
        for finding in check():
            mark = "FAIL" if finding.fatal else "note" if finding.remedy else "ok"
            print(f"{mark:<5} {finding.subject:<18} {finding.detail}")
            if finding.remedy:
                print(f"{'':<5} {'':<18} -> {finding.remedy}")
            fatal |= finding.fatal
    return 1 if fatal else 0


def _python() -> Iterator[Finding]:
    found = platform.python_version()
    old = sys.version_info[:2] < OLDEST_PYTHON
    remedy = f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer" if old else ""
    yield Finding("python", f"{found} at {sys.executable}", remedy, fatal=old)
    yield Finding("platform", f"{platform.system()} {platform.release()} on {platform.machine()}")


def _machine() -> Iterator[Finding]:
    usable, all_cores = usable_cores(), os.cpu_count() or 1
    limit = "" if usable == all_cores else f" of {all_cores} (the rest are withheld by affinity or a container's quota)"
    yield Finding("cores", f"{usable}{limit}")
    memory = host_memory()
    remedy = "close other programs, or choose a smaller model" if memory.free_bytes < SMALL_MEMORY_BYTES else ""
    yield Finding("memory", f"{format_bytes(memory.free_bytes)} free of {format_bytes(memory.total_bytes)}", remedy)


def _packages() -> Iterator[Finding]:
    """The dependencies that the installed metadata names, by extra."""
    try:
        requirements = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("octavo", "runs from a source tree, not installed", "pip install -e . builds the native kernels")
        return
    missing: dict[str, list[str]] = {"": []}
    for text in requirements:
        match = _REQUIREMENT.fullmatch(text)
        if match is not None and match[1] != "octavo":
            lacks = missing.setdefault(match[3] or "", [])
            if problem := _lack(match[1], match[2]):
                lacks.append(problem)
    for extra, lacks in missing.items():
        what = f"octavo[{extra}]" if extra else "octavo"
        detail = ", ".join(lacks) if lacks else "all packages present"
        yield Finding(what, detail, f"pip install '{what}'" if lacks else "", fatal=bool(lacks and not extra))


def _lack(name: str, oldest: str | None) -> str:
    """What is wrong with an installed package: missing, too old, or "" for nothing."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    if oldest and _numbers(version) < _numbers(oldest):
        return f"{name} {version} is older than {oldest}"
    return ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.split("+")[0])]


def _torch() -> Iterator[Finding]:
    try:
        yield Finding("torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        yield Finding("torch", "missing", "install a build of torch that suits this machine", fatal=True)


def _compiler() -> Iterator[Finding]:
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    path = next((found for name in wanted if (found := shutil.which(name))), None)
    remedy = "" if path else "install g++ or clang++, then install octavo again, to build the native kernels"
    yield Finding("C++ compiler", path or f"none ({', '.join(wanted)})", remedy)


def _backends() -> Iterator[Finding]:
    from octavo.core.backend.registry import Available, BackendRegistry

    registry, any_available = BackendRegistry.discover(), False
    for info in registry.infos():
        answer = registry.probe(info.name)
        if isinstance(answer, Available):
            any_available |= not answer.is_emulated
            yield Finding(f"backend {info.name}", answer.detail)
        else:
            yield Finding(f"backend {info.name}", f"can't run here: {answer.reason}", answer.remedy)
    if not any_available:
        yield Finding("backends", "none can run here", "install a backend's package for this machine", fatal=True)


def _demo_models() -> Iterator[Finding]:
    from octavo.core.load.demos import DEMO_MODELS

    for name, demo in DEMO_MODELS.items():
        modules = [package.replace("-", "_") for package in (demo.package, *demo.part_packages)]
        there = all(importlib.util.find_spec(module) for module in modules)
        yield Finding(f"model {name}", "present" if there else "not installed", "" if there else demo.install_command)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _machine,
    _torch,
    _compiler,
    _packages,
    _backends,
    _demo_models,
)
