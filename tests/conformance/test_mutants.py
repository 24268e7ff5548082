"""Every mutant is caught by a case that names it, and the reference itself passes the very same cases."""

from __future__ import annotations

import pytest

from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.mutants.gate import mutants, try_mutant, unknown_faults
from octavo.conformance.suite import catching, families

SEED = 20


@pytest.mark.parametrize("name", mutants())
def test_caught(name: str) -> None:
    verdict = try_mutant(mutants()[name], SEED)
    assert verdict.is_caught, f"{verdict.fault}: escaped {verdict.tried} cases"


@pytest.mark.parametrize("name", mutants())
def test_the_reference_passes_what_catches_it(name: str) -> None:
    results = [judge(case, HostBackend(), SEED) for case in catching(name, families().values())]
    assert [r.detail for r in results if r.status is not Status.PASS] == []


def test_every_fault_that_a_case_names_exists() -> None:
    assert unknown_faults(families().values(), mutants()) == {}
