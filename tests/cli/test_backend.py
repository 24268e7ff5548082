"""`octavo backend new`: the package it writes, and the names it refuses."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from octavo.core.cli.main import main


def test_it_writes_a_package_that_hangs_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backend", "new", "my-accel2", "--dir", str(tmp_path / "new")]) == 0
    folder = tmp_path / "new" / "octavo-my-accel2"
    assert f"wrote {folder}" in capsys.readouterr().out
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "octavo-my-accel2"
    assert project["project"]["entry-points"]["octavo.backends"] == {"my-accel2": "octavo_my_accel2.plugin"}
    package = folder / "src" / "octavo_my_accel2"
    assert {path.name for path in package.iterdir()} == {
        "__init__.py", "plugin.py", "probe.py", "device.py", "ops.py", "kernels.py", "gaps.toml",
    }  # fmt: skip
    assert tomllib.loads((package / "gaps.toml").read_text()) == {}
    classes = [node.name for node in ast.walk(ast.parse((package / "device.py").read_text())) if hasattr(node, "bases")]
    assert "MyAccel2Backend" in classes
    for path in folder.rglob("*"):
        assert path.is_dir() or "$" not in path.read_text(), path


def test_it_uses_the_public_surface_only(tmp_path: Path) -> None:
    main(["backend", "new", "accel", "--dir", str(tmp_path)])
    for path in (tmp_path / "octavo-accel" / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name for name in names if name.split(".")[0] == "octavo"} <= {"octavo.core.backend"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Acme", "it must begin with a letter and hold lower case"),
        ("1st", "it must begin with a letter"),
        ("a--b", "single - or _"),
        ("../x", "it must begin with a letter"),
        ("class", "it must begin with a letter"),
        ("auto", "taken by package octavo"),
        ("cpu", "taken by package octavo; choose another"),
    ],
)
def test_names_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, message: str) -> None:
    assert main(["backend", "new", name, "--dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "octavo-accel").mkdir()
    assert main(["backend", "new", "accel", "--dir", str(tmp_path)]) == 2
    assert "exists already; give another --dir" in capsys.readouterr().err
    assert main(["backend", "mew", "accel"]) == 2
    assert "did you mean 'new'" in capsys.readouterr().err
