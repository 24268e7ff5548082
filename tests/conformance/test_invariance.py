"""Batch invariance and thread invariance: what the profile `deterministic` asks beyond equal bits in two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.grid import invariance
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.worker import BackendChoice, InProcess, make_backend
from octavo.conformance.session import compare_threads
from octavo.core.backend import ReferenceOps

CASES: Mapping[str, Case] = {case.name: case for case in invariance.cases()}
SEED = 31


class Nudged(ReferenceOps):
    """From 20 rows on, every output is one unit in the last place off: well within any bound."""

    def rms_norm(self, x: torch.Tensor, weight_M: torch.Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        super().rms_norm(x, weight_M, **kwargs)
        if x.shape[0] >= 20:
            kwargs["out"].copy_(torch.nextafter(kwargs["out"], torch.tensor(torch.inf)))


def test_only_backends_that_declare_it_are_held_to_it() -> None:
    case = CASES["invariance.rms_norm/float32-166x576"]
    assert case.requires(Facts.of(HostBackend().capabilities)) == invariance.NOT_DECLARED
    assert case.requires(Facts.of(HostBackend(batch_invariant=True).capabilities)) is None


def test_a_difference_of_one_bit_between_batches_is_found() -> None:
    case, backend = CASES["invariance.rms_norm/float32-166x576"], HostBackend(Nudged(torch.device("cpu")))
    result = judge(case, backend, SEED)
    assert result.status is Status.FAIL
    assert result.detail.startswith("alone (exact): ")


@pytest.mark.parametrize("name", [name for name in CASES if "float32-h4k2d64" in name and "paged" in name])
def test_the_cpu_gives_the_same_bits_alone_in_chunks_and_in_a_batch(name: str) -> None:
    runner = InProcess(make_backend(BackendChoice(name="cpu", num_threads=2)))
    try:
        result = runner.run(CASES[name], SEED)
    finally:
        runner.close()
    assert result.status is Status.PASS, result.detail


def test_bits_that_depend_on_the_number_of_threads_fail() -> None:
    names = ["invariance.rms_norm/float32-166x576", "invariance.rms_norm/bfloat16-166x64"]
    cases = [CASES[name] for name in names]
    honest, nudged = (InProcess(HostBackend(ops)) for ops in (None, Nudged(torch.device("cpu"))))

    def results() -> list[CaseResult]:
        return [honest.run(case, SEED) for case in cases]

    same, other = results(), results()
    compare_threads([honest], cases, same, SEED)
    assert [r.status for r in same] == [Status.PASS, Status.PASS]
    compare_threads([nudged], cases, other, SEED)
    assert [r.status for r in other] == [Status.FAIL, Status.FAIL]
    assert other[0].detail.startswith("other bits on one thread (fail: alone (exact)")
