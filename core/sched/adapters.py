"""Which adapters run at once, and whose turn is next.

    running   adapter -> requests that run with it            at most max_adapters of them: the slots of the device
    queue     adapters that have waiting requests and no running one, in the order in which they came to wait

A free slot belongs to the first adapter of the queue. While others wait, an adapter that runs may start no more than
`turn` requests; then those behind are held back, its running ones end, and its slot goes to the first of the queue;
with requests still waiting it joins the queue's end. So each adapter's turn comes after finitely many others, however
many requests arrive for those that run. Requests without an adapter are never held back.

The Scheduler tells of every request that waits, starts or ends; the gate itself changes nothing.
"""

from __future__ import annotations

from octavo.core.sched.policy import Reason
from octavo.core.sched.request import Request, RequestStatus


class AdapterGate:
    """AdmissionGate: at most so many different adapters run at once.

    Args:
        max_adapters: None: as many as come.
        turn: requests that an adapter may start while others wait for its slot.
    """

    def __init__(self, max_adapters: int | None, turn: int) -> None:
        self._max_adapters = max_adapters
        self._turn = turn
        self._waiting: dict[str, int] = {}
        self._running: dict[str, int] = {}
        self._starts: dict[str, int] = {}  # of each running adapter, since it runs
        self._queue: dict[str, None] = {}

    def may_start(self, request: Request) -> Reason | None:
        """See AdmissionGate."""
        adapter_id = request.adapter_id
        if adapter_id is None or self._max_adapters is None:
            return None
        if adapter_id in self._running:
            if self._queue and self._starts[adapter_id] >= self._turn:
                return Reason("other adapters wait for its adapter's slot")
            return None
        num_free = self._max_adapters - len(self._running)
        if any(first == adapter_id for first, _ in zip(self._queue, range(num_free), strict=False)):
            return None
        return Reason(f"its adapter has no slot: {len(self._running)} of {self._max_adapters} are in use")

    def wait(self, request: Request) -> None:
        """A request begins to wait, or waits again after it was preempted."""
        if (adapter_id := request.adapter_id) is None:
            return
        self._waiting[adapter_id] = self._waiting.get(adapter_id, 0) + 1
        if adapter_id not in self._running:
            self._queue.setdefault(adapter_id)

    def start(self, request: Request) -> None:
        """A waiting request runs from now on."""
        if (adapter_id := request.adapter_id) is None:
            return
        _count_down(self._waiting, adapter_id)
        self._running[adapter_id] = self._running.get(adapter_id, 0) + 1
        self._starts[adapter_id] = self._starts.get(adapter_id, 0) + 1
        self._queue.pop(adapter_id, None)

    def leave(self, request: Request) -> None:
        """A request ends, or a running one is preempted; its status is still what it was."""
        if (adapter_id := request.adapter_id) is None:
            return
        if request.status is not RequestStatus.RUNNING:
            if not _count_down(self._waiting, adapter_id):
                self._queue.pop(adapter_id, None)
        elif not _count_down(self._running, adapter_id):
            del self._starts[adapter_id]
            if adapter_id in self._waiting:
                self._queue.setdefault(adapter_id)


def _count_down(counts: dict[str, int], key: str) -> int:
    """Count one less; a key without any is dropped."""
    counts[key] -= 1
    return counts[key] or counts.pop(key)
