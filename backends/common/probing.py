"""What the probes of GPU backends have in common: packages, and how torch was built. Imports neither torch nor triton.

A package's metadata and torch's own version.py are read as files: importing torch takes seconds, and a probe is asked
whenever anybody lists the backends.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import Literal

from octavo.core.backend import Available, Refusal

OLDEST = {"torch": (2, 11), "triton": (3, 6)}
"""Versions from which on the kernels are known to compile and run."""

Toolkit = Literal["cuda", "hip"]
"""What torch calls the software below it, as version.py names it."""

_TOOLKIT_NAMES = {"cuda": "CUDA", "hip": "ROCm"}


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process. Triton fixes it when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def emulation(chip: str) -> Available:
    """A probe's answer under the interpreter, where no device is looked for."""
    return Available(f"{chip}, emulated: kernels run in Triton's interpreter on the CPU", is_emulated=True)


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
