"""`octavo conform`: exit codes, the terminal table, narrowing, and calls that are wrong."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.conformance import command
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.worker import BackendChoice
from octavo.conformance.mutants.gate import Verdict
from octavo.core.cli.main import main

CASE = "rms_norm/float32-5x64"
QUICK = ("--backend", "reference", "--in-process", "--seed", "7")


def conform(*words: str) -> int:
    return main(["conform", *words])


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backend's norms are off by a tenth."""

    class Loud:
        def __init__(self, honest: Any) -> None:
            self._honest = honest

        def __getattr__(self, name: str) -> Any:
            return getattr(self._honest, name)

        def rms_norm(self, x: Any, weight_M: Any, **kwargs: Any) -> None:
            self._honest.rms_norm(x, weight_M * 1.1, **kwargs)

    def make(_: BackendChoice) -> HostBackend:
        return HostBackend(Loud(HostBackend().ops))

    monkeypatch.setattr("octavo.conformance.session.make_backend", make)


def test_a_profile_that_is_met_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform(*QUICK, "--only", CASE) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^rms_norm +1 +own +pass 1 +[\d.e-]+ +" + re.escape(CASE), shown, re.MULTILINE)
    assert shown.splitlines()[-1] == f"profile full ({CASE} only: no claim): met"


def test_in_a_worker_process(capfd: pytest.CaptureFixture[str]) -> None:
    assert conform("--backend", "cpu", "--only", CASE) == 0
    shown = capfd.readouterr().out
    assert "backend cpu (octavo" in shown
    assert re.search(r"seed \d+, 1 cases", shown)


@pytest.mark.usefixtures("broken")
def test_a_profile_that_is_not_met_ends_with_1_and_says_how_to_see_it_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conform(*QUICK, "--only", CASE) == 1
    captured = capsys.readouterr()
    assert "NOT met, for 1 reasons" in captured.out
    assert captured.out.splitlines()[-1] == f"again: octavo conform --backend reference --seed 7 --only {CASE}"
    assert f"{CASE}: fail" in captured.err  # at once, while the others are still running


def test_a_fallback_never_earns_gemm(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform("--backend", "none", "--in-process", "--only", CASE) == 0
    assert conform("--backend", "none", "--in-process", "--profile", "smoke", "--only", "gemm.exact/float32-m1-") == 1
    assert "gemm.exact/float32-m1-n48-k100: fallback" in capsys.readouterr().out


def test_reports_are_written_where_asked(tmp_path: Path) -> None:
    page, data = tmp_path / "new" / "page.html", tmp_path / "report.json"
    assert conform(*QUICK, "--only", CASE, "--json", str(data), "--html", str(page)) == 0
    assert json.loads(data.read_text())["cases"][0]["id"] == CASE
    assert CASE in page.read_text()


@pytest.mark.parametrize("words", [(), ("--mutants",), ("--variants",)])
def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it ran")

    for name in ("conform", "try_mutant"):
        monkeypatch.setattr(f"octavo.conformance.command.{name}", never)
    monkeypatch.setattr("octavo.conformance.variants.run.try_variants", never)
    (tmp_path / "file").touch()
    assert conform(*QUICK, *words, "--json", str(tmp_path / "file" / "report.json")) == 2
    assert "can't be written" in capsys.readouterr().err


def test_a_disk_that_fills_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    data = tmp_path / "report.json"
    data.write_text("old")
    monkeypatch.setattr(Path, "write_bytes", full)
    assert conform(*QUICK, "--only", CASE, "--json", str(data)) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert data.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_of_two_runs_that_write_one_report_one_is_there_whole(tmp_path: Path) -> None:
    data = tmp_path / "report.json"
    words = [sys.executable, "-m", "octavo.core.cli.main", "conform", *QUICK[:3], "--json", str(data)]
    runs = [
        subprocess.Popen([*words, "--seed", seed, "--only", CASE], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for seed in ("1", "2")
    ]
    assert [(run.communicate()[1], run.returncode) for run in runs] == [(b"", 0)] * 2
    assert json.loads(data.read_text())["run"]["seed"] in (1, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_a_report_is_written_beside_one_that_another_run_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replaces the report between this one's two steps: neither takes the other's half file."""
    data = tmp_path / "report.json"
    write_bytes = Path.write_bytes

    def other_first(path: Path, content: bytes) -> int:
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
        written = write_bytes(path, content)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        command._write(str(data), b"other")
        return written

    monkeypatch.setattr(Path, "write_bytes", other_first)
    command._write(str(data), b"this")
    assert data.read_bytes() == b"this"
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]


def test_list_shows_profiles_and_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert conform("list") == 0
    assert re.search(r"^core +\d+ cases  what every backend must pass", capsys.readouterr().out, re.MULTILINE)
    assert conform("list", "--profile", "smoke", "--only", "rms_norm") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(line.startswith("rms_norm/") for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "nonesuch", "--only", CASE], "there is no backend 'nonesuch'"),
        (["--profile", "corr", *QUICK], "profile 'corr' must be one of"),
        (["--only", "nonesuch", *QUICK], "no case of profile full fits name nonesuch"),
        (["--only", "rms_nrom", *QUICK], "did you mean 'rms_norm'?"),
        (["--only", "gemm.exakt/", *QUICK], "did you mean 'gemm.exact/'?"),
        (["--profile", "smoke", "--only", "mla_attention", *QUICK], "cases of other profiles do (--profile full)"),
        (["--seed", "x"], "--seed is 'x'; give a whole number from 0"),
        (["--timeout", "0"], "--timeout is '0'; give a number above 0"),
        (["--backend-option", "x"], "--backend-option is 'x'; give KEY=VALUE"),
        (["lisst"], "unknown action 'lisst'; did you mean 'list'?"),
        (["verify"], "octavo conform verify REPORT: 0 arguments given"),
        (["list", "--mutants"], "list and --mutants can't be had at once"),
        (["verify", "/nonesuch.json"], "/nonesuch.json can't be read"),
        (["--profiel", "core"], "unknown flag '--profiel'; did you mean '--profile'?"),
        (["--html", "/proc/nonesuch/x.html", *QUICK, "--only", CASE], "can't be written"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_a_wrong_call_is_one_line_and_ends_with_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conform(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_mutation_gate_prints_every_mutant_and_fails_for_one_that_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fake(mutant: Any, _: int) -> Verdict:
        caught = "" if mutant.name == names[0] else "family/point"
        return Verdict(mutant=mutant.name, fault=mutant.fault, source=mutant.source, caught_by=caught, tried=2)

    from octavo.conformance.mutants.gate import mutants

    names = list(mutants())
    monkeypatch.setattr("octavo.conformance.command.try_mutant", fake)
    file = tmp_path / "gate.json"
    assert conform("--mutants", "--seed", "5", "--json", str(file)) == 1
    *lines, total, last = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert [line.split()[0] for line in heads] == names
    assert heads[0].endswith("ESCAPED 2 cases")
    assert heads[1].endswith("caught by family/point")
    assert max(map(len, lines)) <= 120
    shown = " ".join(" ".join(lines).split())
    assert all(m.fault in shown and f"as in {m.source}" in shown for m in mutants().values())
    assert total.startswith(f"{len(names) - 1}/{len(names)} mutants caught in")
    assert last == f"escaped: {names[0]}"
    assert json.loads(file.read_text())["seed"] == 5


def test_a_timeout_costs_one_case_and_the_profile(capfd: pytest.CaptureFixture[str]) -> None:
    assert conform("--backend", "reference", "--only", CASE, "--timeout", "0.000001") == 1
    assert "timeout 1" in capfd.readouterr().out


def test_the_command_line_reaches_the_suite_without_importing_it() -> None:
    code = (
        "import sys, octavo.core.cli.conform\n"
        "sys.exit(any(m.startswith('octavo.conformance') or m == 'torch' for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": "src"}, timeout=60)


def test_a_report_that_can_not_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def interrupted(self: Path, _: object) -> None:
        seen.append(self.name)
        raise KeyboardInterrupt

    report = tmp_path / "report.json"
    report.write_bytes(b"before")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                command._write(str(report), b"after")
    assert len(set(seen)) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert report.read_bytes() == b"before"
    command._write(str(report), b"after")
    assert report.read_bytes() == b"after"
