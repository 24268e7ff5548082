"""Cases of several ranks: one that dies or hangs costs one case, ranks must agree, and nothing outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.worker import BackendChoice, InProcess, WorkerPool, run_cases
from octavo.conformance.session import Settings, conform, selected
from octavo.conformance.suite import families, select
from octavo.conformance.verify import verify

MODULE = "tests.conformance.misbehaving_group"
CASES = families((MODULE,))
PROC = Path("/proc")


def children(parent: int) -> set[int]:
    """Live processes that this one started."""
    found = set()
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.add(int(stat.parent.name))
    return found


def in_threads(name: str) -> CaseResult:
    return judge(CASES[f"group/{name}"], HostBackend(), 1, peers=[HostBackend()])


@pytest.mark.skipif(not PROC.exists(), reason="needs /proc to see processes")
def test_each_bad_end_of_a_rank_costs_one_case_and_leaves_no_process() -> None:
    order = ["well", "crash", "well", "fail", "well", "hang"]
    before = children(os.getpid())
    runner = WorkerPool(BackendChoice(name="reference", families=(MODULE,)))
    try:
        results, _ = run_cases(runner, [CASES[f"group/{name}"] for name in order], seed=1)
        assert children(os.getpid()) == before  # the last one hung, and took its group with it
    finally:
        runner.close()
    expected = [Status.PASS, Status.CRASH, Status.PASS, Status.FAIL, Status.PASS, Status.TIMEOUT]
    assert [r.status for r in results] == expected, [r.detail for r in results]
    assert results[1].detail.startswith("rank 1 of 2: the worker was killed by SIGSEGV")
    assert results[3].detail == "rank 1: ArithmeticError: the kernel of rank 1"
    assert "no answer within 2 s; workers killed" in results[5].detail
    assert children(os.getpid()) == before


@pytest.mark.skipif(not PROC.exists(), reason="needs /proc to see processes")
def test_workers_end_with_the_process_that_started_them() -> None:
    """Even while they hang in a case."""
    code = (
        "from octavo.conformance.harness.worker import BackendChoice, WorkerPool\n"
        "from octavo.conformance.suite import families\n"
        f"pool = WorkerPool(BackendChoice(name='reference', families=({MODULE!r},)))\n"
        f"pool.run(families(({MODULE!r},))['group/hang_for_long'], 1)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        workers = wait_for(lambda: found if len(found := children(starter.pid)) == 2 else None)
        assert workers
    finally:
        starter.send_signal(signal.SIGKILL)
        starter.wait()
    assert wait_for(lambda: not any((PROC / str(worker)).exists() for worker in workers))


def wait_for(condition, timeout_s: float = 60.0):
    """The first true value of the condition; None after a minute."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    return None


def test_ranks_that_disagree_fail_though_each_is_right_for_itself() -> None:
    assert in_threads("well").status is Status.PASS
    result = in_threads("differ")
    assert result.status is Status.FAIL
    assert "own: 3 elements of rank 1 have other bits than those of rank 0" in result.detail


def test_the_cause_is_named_and_not_the_effect() -> None:
    assert in_threads("fail").detail == "rank 1: ArithmeticError: the kernel of rank 1"


def test_what_differs_is_said_of_its_rank() -> None:
    result = in_threads("well")
    assert {finding.output for finding in result.findings} == {"out of rank 0", "out of rank 1"}


def test_a_group_needs_a_backend_per_rank() -> None:
    with pytest.raises(ValueError, match="needs 2 backends, one per rank, and was given 1"):
        judge(CASES["group/well"], HostBackend(), 1)


def test_without_processes_cases_of_groups_are_left_out_and_no_claim_is_made() -> None:
    results, left_out = run_cases(InProcess(HostBackend()), list(CASES.values()), seed=1)
    assert results == []
    assert set(left_out.values()) == {"a group of 2 needs a process per rank; leave out --in-process"}
    report = conform(Settings(backend="reference", only="all_gather/world2-float32", seed=1, in_process=True))
    assert report.cases == []
    assert not report.verdict.is_met


def test_a_report_of_a_group_is_replayed_in_processes_and_in_nothing_less() -> None:
    name = "all_gather/world2-float32-1x64"
    report = conform(Settings(backend="reference", only=name, seed=1))
    assert report.run.device.count == 2
    assert verify(report, 1.0).holds
    outcome = verify(report, 1.0, in_process=True)
    assert (outcome.replayed, outcome.differences, outcome.holds) == (0, [], False)
    assert outcome.notes[-1] == f"{name}: not replayed: a group of 2 needs a process per rank; leave out --in-process"


def test_a_backend_that_forms_no_groups_is_not_asked_for_any() -> None:
    results, left_out = run_cases(InProcess(HostBackend(world_sizes=(1,))), list(CASES.values()), seed=1)
    assert (results, set(left_out.values())) == ([], {"it forms no groups of 2 here"})


def test_the_cpu_passes_in_a_group_of_processes() -> None:
    """Its own kernels beside its own communicator; `make conform PROFILE=dist` runs all of them."""
    names = [
        "all_reduce_norm/world2-float32-5x577",
        "all_reduce/world2-float32-65x1024",
        "all_reduce/world2-float32-3x80-gap16",
        "all_gather/world2-float32-5x577",
        "reduce_scatter/world2-float32-5x577",
        "broadcast/world2-float32-5x577",
        "barrier/world2-float32-1x2",
    ]
    cases = families()
    runner = WorkerPool(BackendChoice(name="cpu", num_threads=1))
    try:
        results, left_out = run_cases(runner, [cases[name] for name in names], seed=5)
    finally:
        runner.close()
    assert not left_out
    assert [(r.name, r.status, r.detail) for r in results if r.status is not Status.PASS] == []


def test_every_world_has_every_collective_in_dist_and_none_is_asked_of_a_device_alone() -> None:
    families_of: dict[int, set[str]] = {}
    for case in select("dist"):
        families_of.setdefault(case.world, set()).add(case.family)
    groups = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "all_reduce_norm"}
    assert families_of == {1: {"all_reduce_norm", "collectives"}, 2: groups, 4: groups, 8: groups}
    assert all(case.world == 1 for case in select("core"))


@pytest.mark.parametrize("strict", [False, True])
def test_a_collective_is_the_communicators_whatever_ops_there_are(strict: bool) -> None:
    """No op is called, so none can have run on the reference."""
    result = judge(families()["collectives/float32-5x577"], HostBackend(object()), seed=1, strict=strict)
    assert (result.status, result.implementation, result.ops) == (Status.PASS, "own", [])


def test_cases_of_collectives_are_chosen_by_the_communicators_name() -> None:
    chosen = selected(Settings(backend="reference", only="communicator"))
    assert {case.family for case in chosen} >= {"collectives", "all_reduce", "barrier"}
    assert all(case.op == "communicator" for case in chosen)
