"""Pools beyond 2³¹ bytes and elements: mapped and hardly touched, so that any machine runs them that could hold two."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from octavo.conformance.case import Case, holds_bytes
from octavo.conformance.facts import Facts
from octavo.conformance.harness.host import CAPABILITIES
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import BackendChoice, InProcess, make_backend
from octavo.conformance.suite import families

BIG = [case for case in families().values() if "beyond-2e" in case.name or "/far-" in case.name]
TOUCHED_KIB = 256 << 10
"""Far below the smallest pool, and above what a case draws."""


@pytest.fixture(scope="module")
def runner() -> Iterator[InProcess]:
    made = InProcess(make_backend(BackendChoice(name="cpu", num_threads=2)))
    yield made
    made.close()


def test_a_pool_concerns_devices_of_twice_its_size() -> None:
    facts = Facts.of(CAPABILITIES)
    assert holds_bytes(facts.total_memory_bytes // 2)(facts) is None
    assert "a pool of 1024.0 GiB is too large" in str(holds_bytes(2**40)(facts))


@pytest.mark.parametrize("case", BIG, ids=[case.name for case in BIG])
def test_it_passes_and_touches_little(case: Case, runner: InProcess) -> None:
    if (reason := case.requires(runner.facts)) is not None:
        pytest.skip(reason)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = runner.run(case, seed=3)
    assert result.status in (Status.PASS, Status.FALLBACK), result.detail
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < TOUCHED_KIB


def test_there_are_such_pools_of_every_op_that_addresses_blocks() -> None:
    assert {case.op for case in BIG} >= {
        "paged_attention",
        "write_kv",
        "copy_blocks",
        "gather_blocks",
        "scatter_blocks",
    }
