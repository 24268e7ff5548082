"""Copies from the host that don't wait: through a pinned ring.

    one half    | ids | positions | lengths | table ……… | free        filled copy after copy; the device reads it later
    other half  | (read by the device) ……………………………… | event ──► waited for before the host writes here again

A copy from ordinary memory makes the host wait until the device has got there, in the order of its work. So a tensor is
first written to pinned memory, which the device may read when it likes, as long as nobody writes there: a half is
reused only when the event behind its last copy has passed.

A tensor that no half holds is copied straight, and waited for. Where it comes again it will come with every step, as
the block table of long requests does (256 requests of 131,072 tokens: 8 MiB), and the halves grow. Only GpuBackend uses
this.
"""

from __future__ import annotations

import torch

from octavo.backends.common.runtime import Runtime, Stream
from octavo.core.backend import Event

HALF_BYTES = 4 << 20
"""Holds the inputs of many steps, as long as requests are short."""

LARGEST_BYTES = 32 << 20
"""Of a tensor that the halves grow for; pinned memory is the host's, and nobody else can have it."""

GROWN_FOR = 4
"""Tensors of that size in a grown half: a step has a table for each KV group, and half a step would be waited for."""

ALIGNMENT_BYTES = 64


class StagingRing:
    """One engine's way from host to device."""

    def __init__(self, runtime: Runtime, stream: Stream, half_bytes: int = HALF_BYTES) -> None:
        self._runtime = runtime
        self._stream = stream
        self._halves = [runtime.pinned(half_bytes) for _ in range(2)]
        self._came_straight: set[int] = set()
        self._passed: list[Event | None] = [None, None]
        self._current = 0
        self._used_bytes = 0

    def send(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Queue out = x, shapes alike; x may change as soon as this returns."""
        if x.dtype != out.dtype or not x.nbytes or not self._can_hold(x.nbytes):
            out.copy_(x)
            return
        staged = self._take(x.nbytes).view(x.dtype).view(x.shape)
        staged.copy_(x)
        out.copy_(staged, non_blocking=True)

    def _can_hold(self, size_bytes: int) -> bool:
        """Whether a half holds so much, made larger where need be."""
        if size_bytes <= len(self._halves[0]):
            return True
        if size_bytes not in self._came_straight or size_bytes > LARGEST_BYTES:
            self._came_straight.add(size_bytes)
            return False
        self._runtime.event(self._stream).wait()  # once: nothing may be read any more of what is given up
        self._halves = [self._runtime.pinned(GROWN_FOR * size_bytes) for _ in range(2)]
        self._passed = [None, None]
        self._used_bytes = 0
        return True

    def _take(self, size_bytes: int) -> torch.Tensor:
        if self._used_bytes + size_bytes > len(self._halves[0]):
            self._turn()
        start = self._used_bytes
        self._used_bytes = start + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return self._halves[self._current][start : start + size_bytes]

    def _turn(self) -> None:
        """Go to the other half, when the device has read what lies there."""
        self._passed[self._current] = self._runtime.event(self._stream)
        self._current = 1 - self._current
        if (passed := self._passed[self._current]) is not None:
            passed.wait()
        self._used_bytes = 0
