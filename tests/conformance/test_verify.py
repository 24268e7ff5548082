"""`octavo conform verify`: a report that was made here holds; one that was touched, or is another suite's, does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from octavo.conformance.harness.result import Status
from octavo.conformance.report import json as file
from octavo.conformance.session import Settings, conform
from octavo.conformance.verify import verify
from octavo.core.base.errors import ConfigError
from octavo.core.cli.main import main


@pytest.fixture(scope="module")
def report() -> file.Report:
    return conform(Settings(backend="reference", only="rms_norm/float32-5x", seed=12, in_process=True))


def with_case(report: file.Report, **changes: object) -> file.Report:
    """The report with one case told otherwise; all of its cases are replayed, being few."""
    return msgspec.structs.replace(
        report, cases=[msgspec.structs.replace(report.cases[0], **changes), *report.cases[1:]]
    )


def with_run(report: file.Report, **changes: object) -> file.Report:
    return msgspec.structs.replace(report, run=msgspec.structs.replace(report.run, **changes))


def test_an_honest_report_holds(report: file.Report) -> None:
    outcome = verify(report, 1.0, in_process=True)
    assert outcome.holds
    assert outcome.replayed == len(report.cases)
    assert outcome.notes == []


def test_a_share_of_a_long_report_is_replayed(report: file.Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.conformance.verify.FEWEST", 2)
    assert verify(report, 0.01, in_process=True).replayed == 2
    assert verify(report, 0.5, in_process=True).replayed == -(-len(report.cases) // 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": Status.FAIL}, "pass, and fail in the report"),
        ({"share": 0.123}, "share .*, and 0.123 in the report"),
        ({"implementation": "fallback"}, "ran on own, and on fallback in the report"),
    ],
)
def test_a_case_that_was_touched_is_found(report: file.Report, changes: dict[str, object], message: str) -> None:
    outcome = verify(with_case(report, **changes), 1.0, in_process=True)
    assert not outcome.holds
    (line,) = [line for line in outcome.differences if line.startswith(report.cases[0].id)]
    assert re.search(message, line)


def test_figures_of_another_device_are_not_compared(report: file.Report) -> None:
    device = msgspec.structs.replace(report.run.device, name="another")
    outcome = verify(with_run(with_case(report, share=0.123), device=device), 1.0, in_process=True)
    assert outcome.holds
    assert outcome.notes == ["device host, and another in the report: figures are not compared"]


def test_a_case_that_was_left_out_is_found(report: file.Report) -> None:
    whole = with_run(report, only="", profile="tiny", must_pass=report.run.must_pass)
    outcome = verify(whole, 1.0, in_process=True)
    assert any("belongs to the profile, and is not in the report" in line for line in outcome.differences)


def test_a_verdict_that_its_own_cases_contradict_is_found(report: file.Report) -> None:
    outcome = verify(with_case(report, status=Status.CRASH), 1.0, in_process=True)
    assert "the report calls profile full met, and rms_norm/float32-5x1 spoils it" in outcome.differences


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite_version": 99}, "suite version 99, this suite 1: verify it with Octavo"),
        ({"spec_version": 99}, "specification version 99"),
        ({"profile": "nonesuch"}, "profile 'nonesuch', which this suite doesn't have"),
        ({"must_pass": {"full": "0" * 16}}, "must-pass hash of profile full is 0000000000000000"),
    ],
)
def test_a_report_of_another_suite_is_refused(report: file.Report, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(with_run(report, **changes), 1.0, in_process=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole + b"}",
        lambda whole: bytes(range(256)) * 4,
        lambda whole: b"\xff\xfe" + whole,
        lambda whole: b"[" * 100_000,
        lambda whole: b'{"schema_version": 1e999}',
    ],
    ids=[
        "empty",
        "truncated",
        "more behind it",
        "binary",
        "a mark before it",
        "nested deep",
        "a version beyond numbers",
    ],
)
def test_a_file_that_is_no_whole_report_is_refused_in_one_line(
    damage: Callable[[bytes], bytes], report: file.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(damage(file.encode(report)))
    assert main(["conform", "verify", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"{path} is no report of `octavo conform --json`" in line


def test_a_directory_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "verify", str(tmp_path)]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_from_the_command_line(report: file.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(file.encode(report))
    assert main(["conform", "verify", str(path), "--in-process", "--share", "0.5"]) == 0
    assert capsys.readouterr().out.endswith("the report holds\n")
    path.write_bytes(file.encode(with_case(report, status=Status.FAIL)))
    assert main(["conform", "verify", str(path), "--in-process", "--share", "1"]) == 1
    assert "does NOT hold: 2 differ" in capsys.readouterr().out
    assert main(["conform", "verify", str(path), "--share", "2"]) == 2
