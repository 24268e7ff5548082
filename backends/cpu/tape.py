"""What a step did, taken down while it ran: native kernel calls and torch's in-place ops, in order.

    with tape.taking(): step(buffers) ──> Recording ── run(): native calls in one go | torch op | native calls in one go

A recording runs on the very tensors that it was taken from. That holds as long as nothing in the step makes a tensor:
a torch op that gives a new one, or a number to Python (`item`), can't be taken down, and the tape says which it was.
Ops that only make views are passed over: what reads a view has its address.

A NativeContext owns one tape, on which its kernels write. Only program.py asks for recordings.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedCall(ctypes.Structure):
    """Mirror of OctavoCall."""

    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_char_p))


Calls = ctypes.Array[RecordedCall]
Item = tuple[int, bytes] | Callable[[], object]
"""A native call as (address, argument bytes), or a torch op with its arguments."""


class Tape:
    """Takes down one step at a time; between steps it does nothing.

    Attributes:
        is_on: whether a step is being taken down.
        obstacle: the first op of the last one that can't be taken down.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.obstacle: str | None = None
        self._items: list[Item] = []
        self._thread = 0

    @contextmanager
    def taking(self) -> Iterator[list[Item]]:
        """Take down what this thread does within; gives the items as they come."""
        self._items, self.obstacle = [], None
        self._thread, self.is_on = threading.get_ident(), True
        try:
            with _TorchOps(self):
                yield self._items
        finally:
            self.is_on = False

    def put(self, item: Item) -> None:
        """Something was done, by whichever thread."""
        if threading.get_ident() == self._thread:
            self._items.append(item)

    def stumble(self, op: str) -> None:
        """An op can't be taken down."""
        self.obstacle = self.obstacle or op


class _TorchOps(TorchDispatchMode):
    """Sees every op of torch that is called while it is on."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: else torch imports its compiler at the first op, for a second, and leaves a cache's folder behind."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aliases = [value.alias_info for value in func._schema.returns]
        if func._schema.is_mutable and all(alias is not None and alias.is_write for alias in aliases):
            self._tape.put(partial(func, *args, **kwargs))
        elif func._schema.is_mutable or not aliases or None in aliases:
            self._tape.stumble(str(func))
        return func(*args, **kwargs)


class Recording:
    """A step that was taken down.

    Args:
        items: what the tape gave.
        replay: runs native calls in order.
    """

    def __init__(self, items: Sequence[Item], replay: Callable[[Calls], None]) -> None:
        self._parts: list[Callable[[], object]] = []
        calls: list[tuple[int, bytes]] = []
        for item in items:
            if isinstance(item, tuple):
                calls.append(item)
                continue
            self._close(calls, replay)
            self._parts.append(item)
        self._close(calls, replay)

    def run(self) -> None:
        """Do it all again, on the same tensors. Raises NativeError when a kernel says no."""
        for part in self._parts:
            part()

    def _close(self, calls: list[tuple[int, bytes]], replay: Callable[[Calls], None]) -> None:
        if calls:
            self._parts.append(partial(replay, recorded(calls)))
            calls.clear()


def recorded(calls: Sequence[tuple[int, bytes]]) -> Calls:
    """Calls as one array for NativeLibrary.replay(); it keeps the argument bytes alive."""
    return (RecordedCall * len(calls))(*(RecordedCall(*call) for call in calls))
