"""`pytest --pyargs octavo.conformance --backend NAME`, and that op profiles need nothing of the engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = "octavo.conformance.pytest_plugin"


def suite(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Outside the source tree, as a vendor would."""
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-rA"]
    command += ["--pyargs", "octavo.conformance", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )


def test_one_item_per_case(tmp_path: Path) -> None:
    done = suite(tmp_path, "--backend", "cpu", "--profile", "tiny", "--seed", "3", "--only", "rms_norm/float32-5x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "octavo conformance: backend cpu, profile tiny, seed 3" in done.stdout
    assert "test_case[rms_norm/float32-5x64]" in done.stdout
    assert "passed" in done.stdout.splitlines()[-1]


def test_levels_run_likewise(tmp_path: Path) -> None:
    done = suite(tmp_path, "--backend", "cpu", "--profile", "engine", "--seed", "3", "--only", "engine.llama/c")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_case[engine.llama/chunks]" in done.stdout


def test_what_keeps_the_profile_from_being_met_fails(tmp_path: Path) -> None:
    words = ("--backend", "none", "--in-process", "--only", "gemm.exact/float32-m1-n48-k100")
    done = suite(tmp_path, *words)
    assert done.returncode == 1
    assert "fallback: " in done.stdout
    assert "again: octavo conform --backend none --seed" in done.stdout


def test_cases_that_do_not_concern_the_backend_are_skipped(tmp_path: Path) -> None:
    done = suite(tmp_path, "--backend", "cpu", "--in-process", "--only", "rms_norm/float16-5x64")
    assert done.returncode == 0
    assert "its models never compute in float16" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--backend", "nonesuch"], "there is no backend 'nonesuch'"), (["--profile", "corr"], "profile 'corr' must be")],
)
def test_a_wrong_call_ends_the_session_with_the_reason(tmp_path: Path, words: list[str], message: str) -> None:
    done = suite(tmp_path, "--in-process", *words)
    assert done.returncode not in (0, 1)
    assert message in done.stdout + done.stderr


def test_an_installation_brings_the_plug_in_and_it_does_nothing_unasked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert PLUGIN in project["entry-points"]["pytest11"].values()
    code = f"import sys, {PLUGIN}; sys.exit(bool({{'torch', 'msgspec', 'pytest'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")}, timeout=60)


def test_op_profiles_import_nothing_of_the_engine_the_server_or_the_models() -> None:
    """A whole run, worker and reports included, in a process that refuses such imports."""
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(tuple("octavo.core." + part for part in ("engine", "serve", "models"))):
            raise AssertionError(f"the suite imports {name}")

sys.meta_path.insert(0, Refuse())
from octavo.conformance.report import html, json
from octavo.conformance.session import Settings, conform
from octavo.conformance.mutants.gate import mutants
from octavo.conformance.variants.gate import VARIANTS
assert mutants() and VARIANTS
report = conform(Settings(backend="cpu", profile="tiny", only="rms_norm/float32-5x", in_process=True, seed=1))
assert report.verdict.is_met and json.encode(report) and html.render(report)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
