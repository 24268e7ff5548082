"""Waiting requests, in order, with those that a gate holds back set aside.

    heap     (order, request)       ready to be looked at; the smallest order first; ended ones are skipped when met
    gated    request id -> request  a ring: asked again a few at a time, and back into the heap once a gate opens

Both fcfs and priority are the one heap: Request.order carries the policy. A gated request never blocks those behind
it, and no step looks at more than a fixed number of them, so a step costs the same however many wait. Only the
Scheduler talks to it.
"""

from __future__ import annotations

import heapq

from octavo.core.sched.request import Request


class WaitingQueue:
    """Requests that hold no KV."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._queued: dict[str, Request] = {}
        self._gated: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._queued) + len(self._gated)

    @property
    def num_gated(self) -> int:
        """Requests that are set aside."""
        return len(self._gated)

    def push(self, request: Request) -> None:
        """Add a request at its place in the order."""
        self._queued[request.request_id] = request
        heapq.heappush(self._heap, (request.order, request))

    def peek(self) -> Request | None:
        """The next request."""
        while self._heap:
            request = self._heap[0][1]
            if self._queued.get(request.request_id) is request:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        if self._queued.pop(request.request_id, None) is None:
            del self._gated[request.request_id]
        self._drop_stale()

    def set_aside(self, request: Request) -> None:
        """Move a request that is ready to the gated ones."""
        del self._queued[request.request_id]
        self._gated[request.request_id] = request
        self._drop_stale()

    def recall(self, count: int) -> list[Request]:
        """Move up to `count` gated requests, longest set aside first, back to their places in the order."""
        recalled = [request for request, _ in zip(self._gated.values(), range(count), strict=False)]
        for request in recalled:
            del self._gated[request.request_id]
            self.push(request)
        return recalled

    def _drop_stale(self) -> None:
        """Pop a head that left, and rebuild the heap once most of it is stale (amortised O(1) per request)."""
        if self._heap and self._queued.get(self._heap[0][1].request_id) is not self._heap[0][1]:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [(request.order, request) for request in self._queued.values()]
            heapq.heapify(self._heap)
