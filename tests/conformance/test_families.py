"""Every family on the reference ops, on the cpu backend and on a device without ops."""

from __future__ import annotations

import collections
from collections.abc import Iterator

import pytest

from octavo.conformance.case import Case
from octavo.conformance.grid.invariance import NOT_DECLARED
from octavo.conformance.harness.host import HostBackend, NoOps
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.worker import BackendChoice, InProcess, make_backend, run_cases
from octavo.conformance.profiles import PROFILES
from octavo.conformance.report.json import entry
from octavo.conformance.suite import families, select

ALONE = [case for case in families().values() if case.world == 1]
FAMILIES = sorted({case.family for case in ALONE})
SMALL_BYTES = 64 * 1024


def of(family: str, profile: str) -> list[Case]:
    return [case for case in ALONE if case.family == family and PROFILES[profile].contains(case)]


def bad(results: list[CaseResult], *allowed: Status) -> list[str]:
    return [f"{r.name}: {r.status}: {r.detail}" for r in results if r.status not in allowed]


@pytest.fixture(scope="module")
def cpu() -> Iterator[InProcess]:
    runner = InProcess(make_backend(BackendChoice(name="cpu", num_threads=2)))
    yield runner
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_reference_passes(family: str) -> None:
    results, inapplicable = run_cases(InProcess(HostBackend()), of(family, "core") or of(family, "full"), seed=3)
    assert bad(results, Status.PASS) == []
    assert set(inapplicable.values()) <= {NOT_DECLARED}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cpu_passes(family: str, cpu: InProcess) -> None:
    results, _ = run_cases(cpu, of(family, "core"), seed=4)
    assert bad(results, Status.PASS, Status.FALLBACK) == []


@pytest.mark.parametrize("world", [2, 4, 8])
def test_the_reference_passes_in_groups(world: int) -> None:
    """Small messages, as threads; test_group.py has the processes."""
    cases = [case for case in families().values() if case.world == world and case.axes["calls"] == "1"]
    cases = [case for case in cases if int(case.axes["bytes"]) <= (SMALL_BYTES if world == 2 else 256)]
    assert {case.axes["dtype"] for case in cases} == {"float32", "bfloat16", "float16"}
    results = [judge(case, HostBackend(), 3, peers=[HostBackend() for _ in range(1, world)]) for case in cases]
    assert bad(results, Status.PASS) == []


def test_a_device_without_ops_passes_by_fallback_and_does_not_earn_the_profile() -> None:
    runner = InProcess(HostBackend(NoOps()))
    results, _ = run_cases(runner, select("tiny", op="gemm") + select("tiny", op="rms_norm"), seed=5)
    assert bad(results, Status.FALLBACK) == []
    failures = PROFILES["core"].failures([entry(r) for r in results], is_deterministic=True)
    assert len(failures) == collections.Counter(r.op for r in results)["gemm"] > 0


def test_names_are_unique() -> None:
    assert len(families()) == len({case.name for case in families().values()})


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_belongs_to_a_profile_besides_full(family: str) -> None:
    assert any(case.profiles & (set(PROFILES) - {"full"}) for case in families().values() if case.family == family)
