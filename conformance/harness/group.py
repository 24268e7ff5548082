"""A case of several ranks: their outcomes as one, and ranks as threads of this process.

    rank 0: backend ─┐
    rank 1: backend ─┼─ one group, meeting at an address of its own ─► an Outcome each ─► whole(): one, for the verdict
    rank …: backend ─┘

The worker pool gives each rank a process (worker.py); mutants, which neither crash nor hang, run as threads. A new
group is formed for each case: what one case leaves behind must not decide the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.conformance.case import Case
from octavo.conformance.finding import Finding
from octavo.conformance.harness.attempt import execute
from octavo.conformance.harness.result import Outcome
from octavo.core.backend import DeviceBackend
from octavo.core.parallel.meeting import meeting_point


def execute_in_threads(
    case: Case, backends: Sequence[DeviceBackend], seed: int, *, strict: bool = False
) -> list[Outcome]:
    """The case on backends of this process, one per rank."""
    if len(backends) != case.world:
        raise ValueError(f"case {case.name} needs {case.world} backends, one per rank, and was given {len(backends)}")

    def run(rank: int) -> Outcome:
        return execute(case, backends[rank], seed, strict=strict, rank=rank, address=address)

    with meeting_point() as address, ThreadPoolExecutor(case.world) as threads:
        return list(threads.map(run, range(case.world)))


def whole(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcomes of all ranks as one, without what they computed. Refused only where all refuse."""
    if len(outcomes) == 1:
        return outcomes[0]
    weakest = next((o for o in outcomes if o.implementation == "fallback"), outcomes[0])
    # What a rank says whose peer is gone is an effect: the cause comes first.
    failed = sorted((o.is_lost, rank) for rank, o in enumerate(outcomes) if o.error)
    return Outcome(
        implementation=weakest.implementation,
        reason=weakest.reason,
        ops=sorted({op for o in outcomes for op in o.ops}),
        is_refused=all(o.is_refused for o in outcomes),
        error=f"rank {failed[0][1]}: {outcomes[failed[0][1]].error}" if failed else "",
        faults=_by_rank(o.faults for o in outcomes),
        mistrust=_by_rank(o.mistrust for o in outcomes),
        seconds=max(o.seconds for o in outcomes),
    )


def of_rank(rank: int, findings: Iterable[Finding]) -> list[Finding]:
    """Findings that say whose they are."""
    return [msgspec.structs.replace(finding, output=f"{finding.output} of rank {rank}") for finding in findings]


def disagreements(outcomes: Sequence[Outcome], shared: Iterable[str]) -> list[str]:
    """Outputs that ought to have the same bits on every rank, and don't."""
    found = []
    for name in sorted(shared):
        first, *others = (o.attempts[0].get(name) for o in outcomes)
        for rank, other in enumerate(others, 1):
            if first is not None and other is not None and other.data != first.data:
                differing = int((other.tensor() != first.tensor()).sum())
                found.append(f"{name}: {differing} elements of rank {rank} have other bits than those of rank 0")
    return found[:1]


def _by_rank(lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"rank {rank}: {line}" for rank, own in enumerate(lines) for line in own]
