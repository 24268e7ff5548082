"""Every mutant is honest off its trigger, and is caught by a case that names it, which its honest ops pass."""

from __future__ import annotations

import pytest
import torch

from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.mutants.gate import mutants, try_mutant, unknown_faults
from octavo.conformance.suite import families
from octavo.core.backend import OP_NAMES, ReferenceOps
from tests.conformance import benign

SEED = 20
MUTANTS = mutants()


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    verdict = try_mutant(MUTANTS[name], SEED)
    assert verdict.is_caught, f"{verdict.fault}: escaped {verdict.tried} cases"


@pytest.mark.parametrize("name", MUTANTS)
def test_what_it_is_made_of_passes_what_catches_it(name: str) -> None:
    case = families()[try_mutant(MUTANTS[name], SEED).caught_by]
    mutant = MUTANTS[name]
    host, *peers = (HostBackend(mutant.honest_ops(), **mutant.backend) for _ in range(case.world))
    result = judge(case, host, SEED, peers=peers)
    assert result.status is Status.PASS, result.detail


@pytest.mark.parametrize("name", MUTANTS)
def test_off_its_trigger_it_is_what_it_is_made_of_bit_for_bit(name: str) -> None:
    mutant = MUTANTS[name]
    broken, honest = mutant.make().ops, mutant.honest_ops()
    for op in mutant.ops:
        call = benign.INSTEAD.get(name, benign.PLAIN[op])
        want = call(honest)
        for got in (call(broken), call(broken)):
            assert [x.view(torch.uint8).tolist() for x in got] == [x.view(torch.uint8).tolist() for x in want], op


def test_there_is_a_benign_call_of_every_op_and_it_does_something() -> None:
    assert {*benign.PLAIN, "prepare_weight"} == {*OP_NAMES, "prepare_weight"}
    for op, call in benign.PLAIN.items():
        assert all(bool(x.any()) for x in call(ReferenceOps(torch.device("cpu")))), op


def test_every_fault_that_a_case_names_exists() -> None:
    assert unknown_faults(families().values(), MUTANTS) == {}
