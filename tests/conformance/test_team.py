"""Cases shared by several runners: the same report, one case for a crash, and an end at once when the run is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from octavo.conformance.case import Case
from octavo.conformance.gaps import Gap, GapKind
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.team import Lines, run_together
from octavo.conformance.harness.worker import BackendChoice, InProcess, WorkerPool, make_backend
from octavo.conformance.report import json
from octavo.conformance.session import Settings, open_runners
from octavo.conformance.suite import families, select
from octavo.core.base.errors import ConfigError
from octavo.core.cli.main import main

MODULES = ("tests.conformance.misbehaving", "tests.conformance.misbehaving_group")
SEED = 3


@pytest.fixture(scope="module")
def pools() -> Iterator[list[WorkerPool]]:
    made = [WorkerPool(BackendChoice(name="reference", families=MODULES)) for _ in range(2)]
    yield made
    for pool in made:
        pool.close()


class Traced(InProcess):
    """Notes who ran what, and when a case began and ended."""

    def __init__(self, log: list[tuple[float, float, str, int]]) -> None:
        super().__init__(make_backend(BackendChoice(name="reference")))
        self._log = log

    def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
        began = time.monotonic()
        result = super().run(case, seed, gap)
        time.sleep(0.01)
        self._log.append((began, time.monotonic(), case.name, id(self)))
        return result


def test_a_crash_a_hang_and_a_gap_cost_the_same_cases_on_two_runners_as_on_one(pools: list[WorkerPool]) -> None:
    cases = families(MODULES)
    names = ("crash", "well", "exit", "print", "hang")
    chosen = [cases[f"behaviour/{name}"] for name in names] + [cases["behaviour/crash_in_a_model"]]
    gaps = {"behaviour/exit": Gap("behaviour/exit", GapKind.NOTYET, "as it is")}
    told: list[str] = []
    shared = run_together(pools, chosen, 1, gaps=gaps, on_result=lambda result: told.append(result.name))
    assert [result.name for result in shared.results] == [case.name for case in chosen]
    assert sorted(told) == sorted(case.name for case in chosen)
    statuses = [Status.CRASH, Status.PASS, Status.XFAIL, Status.PASS, Status.TIMEOUT, Status.CRASH]
    assert [result.status for result in shared.results] == statuses, [result.detail for result in shared.results]


def test_a_group_runs_after_the_others_and_on_the_first_runner(pools: list[WorkerPool]) -> None:
    cases = families(MODULES)
    chosen = [cases["group/well"], cases["behaviour/well"], cases["behaviour/print"]]
    order: list[str] = []
    shared = run_together(pools, chosen, 1, on_result=lambda result: order.append(result.name))
    assert order[-1] == "group/well"
    assert [(r.name, r.status) for r in shared.results] == [(case.name, Status.PASS) for case in chosen]


def test_bits_and_figures_do_not_depend_on_the_number_of_runners() -> None:
    cases = select("smoke", op="gemm")[:6] + select("smoke", op="rms_norm")[:6]
    log: list[tuple[float, float, str, int]] = []
    one = run_together([Traced([])], cases, SEED).results
    two = run_together([Traced(log), Traced(log)], cases, SEED).results
    assert len({runner for *_, runner in log}) == 2
    assert [(r.name, r.status, r.digest, r.share) for r in two] == [(r.name, r.status, r.digest, r.share) for r in one]


def test_what_needs_the_device_alone_has_nothing_beside_it() -> None:
    log: list[tuple[float, float, str, int]] = []
    cases = select("smoke", op="rms_norm")[:6]
    large = Case(**{name: getattr(cases[2], name) for name in Case.__dataclass_fields__} | {"is_large": True})
    run_together([Traced(log), Traced(log)], [*cases[:2], large, *cases[3:]], SEED)
    (began, ended, *_), *_ = [entry for entry in log if entry[2] == large.name]
    assert len(log) == 6
    assert all(e <= began or b >= ended for b, e, name, _ in log if name != large.name)


def test_a_family_stays_with_a_runner_until_none_is_left_to_begin() -> None:
    gemms, norms = select("smoke", op="gemm", name="gemm.exact/")[:2], select("smoke", op="rms_norm")[:4]
    lines = Lines([*gemms, *norms])
    assert [_name(lines, 0), _name(lines, 1), _name(lines, 1)] == [gemms[0].name, norms[0].name, norms[1].name]
    assert [_name(lines, 0), _name(lines, 0), _name(lines, 1)] == [gemms[1].name, norms[2].name, norms[3].name]
    assert [lines.take(0), lines.take(1)] == [None, None]


def test_a_deadline_that_has_passed_runs_nothing_and_names_everything() -> None:
    cases = select("smoke", op="rms_norm")[:3]
    for runners in ([Traced([])], [Traced([]), Traced([])]):
        shared = run_together(runners, cases, SEED, deadline=time.monotonic())
        assert (shared.results, shared.not_run) == ([], [case.name for case in cases])


def test_a_case_under_way_at_the_deadline_counts_as_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.conformance.harness.team.OVERTIME_S", 0.5)
    cases = families(MODULES)
    hang = Case(**{n: getattr(cases["behaviour/hang"], n) for n in Case.__dataclass_fields__} | {"timeout_s": 300.0})
    pool = WorkerPool(BackendChoice(name="reference", families=MODULES))
    try:
        shared = run_together([pool], [cases["behaviour/well"], hang], 1, deadline=time.monotonic() + 3.0)
    finally:
        pool.close()
    assert [result.name for result in shared.results] == ["behaviour/well"]
    assert shared.not_run == ["behaviour/hang"]


def test_a_deadline_has_the_small_cases_run_first() -> None:
    log: list[tuple[float, float, str, int]] = []
    cases = select("core", op="rms_norm")
    run_together([Traced(log)], cases, SEED, deadline=time.monotonic() + 600)
    is_tiny = {case.name: "tiny" in case.profiles for case in cases}
    flags = [is_tiny[name] for _, _, name, _ in log]
    assert len(log) == len(cases)
    assert flags == sorted(flags, reverse=True)


def test_what_a_runner_raises_ends_the_run() -> None:
    class Broken(Traced):
        def run(self, case: Case, seed: int, gap: Gap | None = None) -> CaseResult:
            raise MemoryError("in the judge")

    before = threading.active_count()
    with pytest.raises(MemoryError, match="in the judge"):
        run_together([Traced([]), Broken([])], select("smoke", op="rms_norm")[:6], SEED)
    assert threading.active_count() == before


def test_two_jobs_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reports = [_report(tmp_path, "--jobs", jobs) for jobs in ("1", "2")]
    one, two = ([(case.id, case.status, case.share, case.rerun) for case in report.cases] for report in reports)
    assert one == two
    assert reports[1].verdict.is_met


def test_a_budget_that_is_spent_leaves_the_profile_unmet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = _report(tmp_path, "--budget", "0.000001")
    assert report.cases == []
    assert len(report.not_run) > 3
    assert report.verdict.reasons[-1] == f"{len(report.not_run)} cases were not run: the budget of 1e-06 s was spent"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "0"], "--jobs is '0'; give a whole number from 1"),
        (["--jobs", "2", "--in-process", "--only", "act_mul"], "--jobs 2 needs a worker process each"),
        (["--jobs", "2", "--mutants"], "--jobs can't be had with --mutants"),
        (["--jobs", "2", "--profile", "perf"], "--jobs can't be had with --profile perf"),
        (["--budget", "-1"], "--budget is '-1'; give a number above 0"),
    ],
)
def test_a_wrong_call(words: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conform", "--backend", "reference", *words]) == 2
    assert message in capsys.readouterr().err


def test_no_worker_is_left_when_one_of_several_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Made:
        def close(self) -> None:
            closed.append("closed")

    attempts = iter([Made(), ConfigError("no more of them")])

    def start(*_: object, **__: object) -> object:
        made = next(attempts)
        if isinstance(made, ConfigError):
            raise made
        return made

    monkeypatch.setattr("octavo.conformance.session.open_runner", start)
    with pytest.raises(ConfigError, match="no more"), open_runners(Settings(backend="cpu", jobs=2), "cpu"):
        raise AssertionError("it was opened")
    assert closed == ["closed"]


def test_ctrl_c_ends_two_hanging_cases_and_their_workers() -> None:
    """In a process of its own, as a terminal would send it."""
    code = (
        "from octavo.conformance.harness.team import run_together\n"
        "from octavo.conformance.harness.worker import BackendChoice, WorkerPool\n"
        "from octavo.conformance.suite import families\n"
        "from dataclasses import replace\n"
        f"modules = {MODULES!r}\n"
        "hang = replace(families(modules)['behaviour/hang'], timeout_s=300.0)\n"
        "pools = [WorkerPool(BackendChoice(name='reference', families=modules)) for _ in range(2)]\n"
        "print('begins', flush=True)\n"
        "run_together(pools, [hang, hang], 1)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    assert running.stdout is not None
    assert running.stdout.readline() == "begins\n"
    time.sleep(1.0)
    os.killpg(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=30)
    assert running.returncode != 0
    assert errors.count("Traceback") == 1  # the interrupted call's own
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)


def _name(lines: Lines, runner: int) -> str:
    case = lines.take(runner)
    assert case is not None
    return case.name


def _report(folder: Path, *words: str) -> json.Report:
    file = folder / f"{'-'.join(words).strip('-')}.json"
    main(["conform", "--backend", "cpu", "--profile", "smoke", "--only", "act_mul", "--seed", "5", *words,
          "--json", str(file)])  # fmt: skip
    return json.decode(file.read_bytes())
