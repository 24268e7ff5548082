"""Points that the grid doesn't hold: the reference and the CPU pass them, a broken product does not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.conformance.case import Case
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice, make_backend
from octavo.conformance.mutants.gate import mutants
from octavo.conformance.strategies import DTYPES, drawn_cases, drawn_products
from octavo.core.backend import DeviceBackend

drawn = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def cpu() -> Iterator[DeviceBackend]:
    backend = make_backend(BackendChoice(name="cpu", num_threads=2))
    yield backend
    backend.close()


@drawn
@given(drawn_cases(), SEEDS)
def test_the_reference_passes(case: Case, seed: int) -> None:
    result = judge(case, HostBackend(), seed)
    assert result.status is Status.PASS, (case.spec, result.detail)


@drawn
@given(drawn_cases(st.just(torch.float32)), SEEDS)
def test_the_cpu_passes(cpu: DeviceBackend, case: Case, seed: int) -> None:
    result = judge(case, cpu, seed)
    assert result.status in {Status.PASS, Status.FALLBACK}, (case.spec, result.detail)


def test_a_drawn_case_catches_a_broken_product() -> None:
    broken, caught = mutants()["gemm-k-not-multiple-16"].make(), []

    @drawn
    @given(drawn_products(DTYPES), SEEDS)
    def collect(case: Case, seed: int) -> None:
        caught.append(judge(case, broken, seed).status is Status.FAIL)

    collect()
    assert any(caught)
