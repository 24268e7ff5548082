"""A crash, hang or exit inside a kernel costs one case; the next runs in a fresh worker."""

from __future__ import annotations

import pytest

from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice, WorkerPool, run_cases
from octavo.conformance.suite import families
from octavo.core.base.errors import BackendUnavailable

MODULE = "tests.conformance.misbehaving"


def test_each_bad_end_costs_one_case() -> None:
    cases = families((MODULE,))
    order = ["crash", "well", "exit", "print", "hang", "well", "crash_in_a_model", "well"]
    runner = WorkerPool(BackendChoice(name="reference", families=(MODULE,)))
    try:
        results, _ = run_cases(runner, [cases[f"behaviour/{name}"] for name in order], seed=1)
    finally:
        runner.close()
    expected = [Status.CRASH, Status.PASS, Status.CRASH, Status.PASS, Status.TIMEOUT, Status.PASS]
    expected += [Status.CRASH, Status.PASS]
    assert [r.status for r in results] == expected, [r.detail for r in results]
    assert "SIGSEGV" in results[0].detail
    assert "exit code 3" in results[2].detail


def test_a_backend_that_can_not_be_made_says_why() -> None:
    with pytest.raises(BackendUnavailable, match="there is no backend 'nonesuch'"):
        WorkerPool(BackendChoice(name="nonesuch"))
