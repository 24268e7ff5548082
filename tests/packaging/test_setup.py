"""setup.py: every package is installed, by whichever way, and an editable install without the links is refused."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
from distutils.core import run_setup

ROOT = Path(__file__).parents[2]


@pytest.fixture
def read_setup(monkeypatch):
    """(root, command) -> the Distribution that `setup.py command` would work on."""

    def read(root, command):
        monkeypatch.chdir(root)
        monkeypatch.setattr(sys, "argv", ["setup.py", command])
        return run_setup("setup.py", stop_after="init")

    return read


def test_a_wheel_and_an_editable_install_hold_the_same_packages(read_setup):
    wheel, editable = read_setup(ROOT, "bdist_wheel"), read_setup(ROOT, "editable_wheel")
    assert set(wheel.packages) == set(editable.packages)
    folders = {
        f"octavo.{'.'.join(path.parent.relative_to(ROOT).parts)}"
        for top in ("core", "backends", "conformance")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(wheel.packages) == {"octavo"} | folders


def test_a_wheel_is_for_one_platform_and_any_python(read_setup):
    wheel = read_setup(ROOT, "bdist_wheel")
    command = wheel.get_command_obj("bdist_wheel")
    command.ensure_finalized()
    python, abi, platform = command.get_tag()
    assert (python, abi) == ("py3", "none")
    assert platform != "any"


def test_an_editable_install_without_the_links_is_refused(tmp_path):
    (tmp_path / "src/octavo").mkdir(parents=True)
    (tmp_path / "backends/cpu").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "backends/cpu/native_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("core", "backends", "conformance"):  # what git makes of a link where it may not make links
        (tmp_path / "src/octavo" / folder).write_text(f"../../{folder}")
    command = [sys.executable, "setup.py", "editable_wheel"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("src/octavo/core is not a link to core/")


def test_a_wheel_holds_the_templates_of_a_new_backend(read_setup):
    command = read_setup(ROOT, "bdist_wheel").get_command_obj("build_py")
    command.ensure_finalized()
    held = {
        Path(name).name for package, _, _, names in command.data_files if package == "octavo.core.cli" for name in names
    }
    assert held >= {path.name for path in (ROOT / "core/cli/skeleton").iterdir()}


def test_a_wheel_holds_what_backends_keep_beside_their_code(read_setup):
    """Launch parameters and known gaps: without them a kernel does not start, and a report counts gaps as faults."""
    command = read_setup(ROOT, "bdist_wheel").get_command_obj("build_py")
    command.ensure_finalized()
    held = {Path(package.replace("octavo.", "").replace(".", "/"), name.split(f"{source}/", 1)[-1])
            for package, source, _, names in command.data_files for name in names}  # fmt: skip
    beside = {path.relative_to(ROOT) for path in (ROOT / "backends").rglob("*.toml")}
    assert {Path("backends/cuda/gaps.toml"), Path("backends/rocm/gaps.toml")} <= beside
    assert held >= beside


def test_a_wheel_holds_the_page(read_setup):
    command = read_setup(ROOT, "bdist_wheel").get_command_obj("build_py")
    command.ensure_finalized()
    held = {
        Path(name).name
        for package, _, _, names in command.data_files
        if package == "octavo.core.serve.page"
        for name in names
    }
    assert held == {path.name for path in (ROOT / "core/serve/page").iterdir() if path.is_file()} - {"__init__.py"}
