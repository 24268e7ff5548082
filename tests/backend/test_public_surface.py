"""The public surface `octavo.core.backend` changes only on purpose.

surface.txt records every public name with its fields and signatures. When the surface is changed on purpose:

    python tests/backend/test_public_surface.py        writes surface.txt and prints its mark

and the change is described in core/backend/CHANGELOG.md under that mark. After 1.0 API_VERSION is raised too.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import octavo.core.backend as surface

HERE = Path(__file__).parent
RECORD = HERE / "surface.txt"
CHANGELOG = HERE.parents[1] / "core" / "backend" / "CHANGELOG.md"


def describe(name: str, value: Any) -> list[str]:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return [f"enum {name}: {', '.join(member.name for member in value)}"]
    if isinstance(value, type):
        return [f"class {name}", *(f"    {line}" for line in members(value))]
    if inspect.isfunction(value):
        return [f"def {name}{inspect.signature(value)}"]
    return [f"{name}: {type(value).__name__}" if " at 0x" in repr(value) else f"{name} = {value!r}"]


def members(cls: type) -> list[str]:
    lines = [field(f) for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    if not lines:
        lines = [f"{n}: {t}" for n, t in inspect.get_annotations(cls).items() if not n.startswith("_")]
        init = vars(cls).get("__init__")
        if inspect.isfunction(init) and "Protocol" not in {base.__name__ for base in cls.__mro__}:
            lines.append(f"__init__{inspect.signature(init)}")
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if inspect.isfunction(plain):
            lines.append(f"{name}{inspect.signature(plain)}")
        elif isinstance(value, property):
            lines.append(f"{name}: property")
    return lines


def field(f: dataclasses.Field[Any]) -> str:
    has_default = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
    default = "..." if f.default is dataclasses.MISSING else repr(f.default)
    return f"{f.name}: {f.type}" + (f" = {default}" if has_default else "")


def text() -> str:
    return "\n".join(line for name in sorted(surface.__all__) for line in describe(name, getattr(surface, name))) + "\n"


def mark(record: str) -> str:
    return hashlib.sha256(record.encode()).hexdigest()[:12]


def test_the_surface_is_the_recorded_one() -> None:
    assert text() == RECORD.read_text(), "the public surface changed; if that is meant, see this file's head"


def test_the_changelog_describes_the_recorded_surface() -> None:
    assert f"surface {mark(RECORD.read_text())}" in CHANGELOG.read_text(), (
        f"describe the change in core/backend/CHANGELOG.md under `surface {mark(RECORD.read_text())}`"
    )


def test_every_public_name_can_be_imported_and_is_listed() -> None:
    assert sorted(surface.__all__) == dir(surface)
    for name in surface.__all__:
        assert getattr(surface, name) is not None


def test_importing_the_surface_imports_no_torch() -> None:
    code = "import octavo.core.backend, sys; assert 'torch' not in sys.modules"
    src = HERE.parents[1] / "src"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    RECORD.write_text(text())
    sys.stdout.write(f"surface {mark(text())}\n")
