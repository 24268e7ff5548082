"""`octavo conform verify`: a report that was made here holds; one that was touched, or is another suite's, does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from octavo.conformance.audit import contradictions
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
    line = next(line for line in outcome.differences if line.startswith(report.cases[0].id))
    assert re.search(message, line)


def elsewhere(report: file.Report) -> file.Report:
    """The report as if made on another device."""
    run = report.run
    return with_run(
        report,
        device=msgspec.structs.replace(run.device, name="another"),
        capabilities=msgspec.structs.replace(run.capabilities, device_name="another"),
    )


def test_figures_of_another_device_are_not_compared(report: file.Report) -> None:
    outcome = verify(elsewhere(with_case(report, share=0.123)), 1.0, in_process=True)
    assert outcome.holds
    assert outcome.uncompared == ["device host, and another in the report"]


def test_a_device_renamed_in_one_place_is_found(report: file.Report) -> None:
    device = msgspec.structs.replace(report.run.device, name="another")
    outcome = verify(with_run(report, device=device), 1.0, in_process=True)
    assert outcome.differences == ["run.device.name is another, and by the rest of the report host"]


def test_capabilities_that_the_backend_does_not_declare_are_found(report: file.Report) -> None:
    facts = msgspec.structs.replace(report.run.capabilities, is_emulated=True)
    outcome = verify(with_run(report, capabilities=facts), 1.0, in_process=True)
    assert "run.capabilities.is_emulated is True, and False here" in outcome.differences
    assert any(line.startswith("verdict.no_claim is 'it was narrowed to") for line in outcome.differences)


def test_a_case_that_was_left_out_is_found(report: file.Report) -> None:
    gone = report.cases[3].id
    short = msgspec.structs.replace(report, cases=[entry for entry in report.cases if entry.id != gone])
    outcome = verify(short, 1.0, in_process=True)
    assert outcome.differences == [f"{gone}: belongs to the profile, and is not in the report"]
    whole = verify(with_run(report, only="", profile="tiny"), 1.0, in_process=True)
    assert sum("belongs to the profile, and is not in the report" in line for line in whole.differences) > 20


def with_verdict(report: file.Report, **changes: object) -> file.Report:
    return msgspec.structs.replace(report, verdict=msgspec.structs.replace(report.verdict, **changes))


def unrun(report: file.Report) -> file.Report:
    """The first case among those that there was no time for, and the verdict as it was."""
    return msgspec.structs.replace(report, cases=report.cases[1:], not_run=[report.cases[0].id])


FIRST = "rms_norm/float32-5x1"


def test_a_selection_that_the_profile_cannot_hold_is_a_difference(report: file.Report) -> None:
    outcome = verify(with_run(report, only="gemm", profile="dist"), 1.0, in_process=True)
    assert not outcome.holds
    assert any("run.only is 'gemm', which no run of profile dist can have" in line for line in outcome.differences)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (
            lambda r: with_case(r, status=Status.CRASH),
            "verdict.is_met is True; the report's own cases and run give False",
        ),
        (unrun, "verdict.is_met is True; the report's own cases and run give False"),
        (
            lambda r: with_verdict(r, is_met=False),
            "verdict.is_met is False; the report's own cases and run give True",
        ),
        (
            lambda r: with_verdict(r, is_met=False, reasons=["x"]),
            "verdict.reasons has 1 lines; the report's own cases give 0; the first that differs: x",
        ),
        (
            lambda r: with_verdict(r, profile="core"),
            "verdict.profile is 'core'; the report's own cases and run give 'full'",
        ),
        (
            lambda r: with_verdict(r, is_claim=True, no_claim=""),
            "verdict.is_claim is True; the report's own cases and run give False",
        ),
        (
            lambda r: msgspec.structs.replace(r, cases=[*r.cases, r.cases[0]]),
            f"{FIRST}: 2 times in the report",
        ),
        (lambda r: msgspec.structs.replace(r, not_run=[FIRST]), f"{FIRST}: 2 times in the report"),
        (lambda r: with_case(r, rms=1.5), f"{FIRST}: pass, with rms 1.5: beyond its limit"),
        (lambda r: with_case(r, gain="inf"), f"{FIRST}: pass, with gain inf: beyond its limit"),
        (lambda r: with_case(r, share=-1.0), f"{FIRST}: pass, with share -1.0: beyond its limit"),
        (
            lambda r: with_case(r, lanes=["exact"]),
            f"{FIRST}: its op, parameters or lanes are not those of the suite's case",
        ),
        (
            lambda r: with_case(r, ran=["gemm:fallback"]),
            f"{FIRST}: pass, and ran on own (gemm:fallback)",
        ),
        (
            lambda r: msgspec.structs.replace(r, not_applicable=r.not_applicable | {"gemm/nonesuch": "x"}),
            "gemm/nonesuch: in the report's not_applicable",
        ),
    ],
)
def test_an_edit_is_found_wherever_the_report_was_made(
    report: file.Report, edit: Callable[[file.Report], file.Report], line: str
) -> None:
    assert report.cases[0].id == FIRST
    assert contradictions(elsewhere(report)) == []
    assert line in contradictions(elsewhere(edit(report)))


def test_a_claim_needs_worker_processes_where_groups_are_declared(report: file.Report) -> None:
    facts = msgspec.structs.replace(report.run.capabilities, world_sizes=(1, 2))
    alone = with_run(report, only="", profile="dist", isolated=False, capabilities=facts)
    claimed = with_verdict(alone, profile="dist", is_claim=True, no_claim="")
    wrong = "verdict.is_claim is True; the report's own cases and run give False"
    assert wrong in contradictions(claimed)
    isolated = contradictions(with_run(claimed, isolated=True))
    assert wrong not in isolated
    assert any(line.startswith("collectives") or "world" in line or "-r2" in line for line in isolated)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"suite_version": 99},
            "suite version 99, this suite 1: .* is the one here, and is of another suite version than its Octavo has",
        ),
        ({"spec_version": 99}, "specification version 99"),
        ({"profile": "nonesuch"}, "profile 'nonesuch', which this suite doesn't have"),
        ({"must_pass": {"full": "0" * 16}}, "must-pass hash of profile full is 0000000000000000"),
    ],
)
def test_a_report_of_another_suite_is_refused(report: file.Report, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(with_run(report, **changes), 1.0, in_process=True)


def test_a_report_of_another_octavo_is_sent_there(report: file.Report) -> None:
    older = msgspec.structs.replace(report.run.software, octavo="0.0.9")
    with pytest.raises(ConfigError, match=r"suite version 99, this suite 1: verify it with Octavo 0\.0\.9"):
        verify(with_run(report, suite_version=99, software=older), 1.0, in_process=True)


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
    assert "does NOT hold: 3 differ" in capsys.readouterr().out
    assert main(["conform", "verify", str(path), "--share", "2"]) == 2


def test_what_was_not_compared_is_told_first_and_counted_last(
    report: file.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(file.encode(elsewhere(report)))
    assert main(["conform", "verify", str(path), "--in-process"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "note: figures were NOT compared, statuses only: device host, and another in the report"
    assert last.endswith("cases replayed, the figures of 0, for 1 reasons; the report holds")


def test_many_differences_are_counted(report: file.Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(file.encode(with_run(report, only="", profile="tiny")))
    assert main(["conform", "verify", str(path), "--in-process"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 + 2
    more = re.fullmatch(r"… and (\d+) more differences", lines[-2])
    assert more is not None
    assert lines[-1].endswith(f"does NOT hold: {20 + int(more[1])} differ")
