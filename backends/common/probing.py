"""What the probes of GPU backends have in common: all but asking the driver. Imports neither torch nor triton.

A package's metadata and torch's own version.py are read as files: importing torch takes seconds, and a probe is asked
whenever anybody lists the backends.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from octavo.core.backend import Available, Refusal
from octavo.core.base.units import format_bytes

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
"""Versions from which on the kernels are known to compile and run."""

Toolkit = Literal["cuda", "hip"]
"""What torch calls the software below it, as version.py names it."""

_TOOLKIT_NAMES = {"cuda": "CUDA", "hip": "ROCm"}


class Device(NamedTuple):
    """One device as its driver describes it."""

    name: str
    arch: str
    memory_bytes: int


Driver = Callable[[], list[Device]]
"""Lists the devices that this process may use. Raises OSError saying what is wrong."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one backend looks for.

    Attributes:
        vendor: for people.
        arches: what its kernels are cut to.
        chips: what to use, in words.
        driver: what to install, in words.
        toolkit: what torch must be built for.
        emulated: the chip that the interpreter stands for.
    """

    vendor: str
    arches: tuple[str, ...]
    chips: str
    driver: str
    toolkit: Toolkit
    emulated: str


def answer(wanted: Wanted, driver: Driver) -> Available | Refusal:
    """A probe's answer: the first chip of a known architecture, or why there is none.

    Under Triton's interpreter no device is looked for.
    """
    if is_interpreted():
        detail = f"{wanted.emulated}, emulated: kernels run in Triton's interpreter on the CPU"
        return package_refusal() or Available(detail, is_emulated=True)
    try:
        devices = driver()
    except OSError as error:
        return Refusal(f"no {wanted.vendor} GPU: {error}", f"install {wanted.driver}, or use another backend")
    known = [device for device in devices if device.arch in wanted.arches]
    if not known:
        found = ", ".join(f"{device.name} ({device.arch})" for device in devices) or "none"
        return Refusal(f"it has kernels for {', '.join(wanted.arches)}; found here: {found}", f"use {wanted.chips}")
    refusal = package_refusal() or build_refusal(wanted.toolkit)
    if refusal is not None:
        return refusal
    first, count = known[0], f"{len(known)} × " if len(known) > 1 else ""
    return Available(f"{count}{first.name} ({first.arch}), {format_bytes(first.memory_bytes)}")


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process. Triton fixes it when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def package_refusal() -> Refusal | None:
    """What keeps torch or triton from being used: missing, or too old."""
    for package, oldest in OLDEST.items():
        wanted = ".".join(map(str, oldest))
        remedy = 'pip install "octavo[gpu]"' if package == "triton" else f"install torch {wanted} or newer"
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return Refusal(f"the package {package} is missing", remedy)
        if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < oldest:
            return Refusal(f"{package} {found} is older than {wanted}", remedy)
    return None


def build_refusal(toolkit: Toolkit) -> Refusal | None:
    """A refusal where torch was built for another device, or for none."""
    if torch_builds().get(toolkit):
        return None
    name, found = _TOOLKIT_NAMES[toolkit], importlib.metadata.version("torch")
    return Refusal(f"torch {found} was built without {name}", f"install a build of torch for {name}: see pytorch.org")


def torch_builds(version_file: Path | None = None) -> dict[str, str]:
    """Toolkit -> its version, of those that the installed torch was built for."""
    if version_file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return {}
        version_file = Path(spec.origin).with_name("version.py")
    try:
        tree = ast.parse(version_file.read_text())
    except (OSError, SyntaxError):
        return {}
    found = {}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if (
                isinstance(target, ast.Name)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found[target.id] = node.value.value
    return {name: version for name, version in found.items() if name in _TOOLKIT_NAMES}
