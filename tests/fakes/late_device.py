"""A device whose work runs late, on host tensors: what is wrong with streams, staging, memory or recordings shows.

    torch op or kernel ──► LateDevice.submit ──► queue of the current stream ──► runs when somebody waits for it
                                             └─► tape, while a step is recorded ──► replay() queues it again

Nothing runs before the host waits: for a stream, an event, or a number read back. So who reads too early sees poison,
who reuses pinned memory too early corrupts a copy, and who forgets that another stream must be waited for reads what
that one has not written. Fresh memory is poison (NaN, -1). Memory is counted until its last tensor is gone; a
recording keeps what was allocated while it was made and nothing else, so that a replay finds out what was freed since.
While recording, waiting and reading back raise, as they do on a device.

The tensors are ordinary CPU tensors that call themselves "cpu:0", so that Triton's interpreter can run kernels on them;
late_modes.py takes torch's ops to `submit`. One thread at a time. Active inside `with device:`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils import _pytree as pytree

from octavo.backends.common.launch import Kernel
from octavo.backends.common.launch import launch as launch_now
from octavo.core.backend import MemoryInfo

DEVICE = torch.device("cpu", 0)
POISON = 0xFF
PINNED = "pinned"

Work = Callable[[], None]


class LateStream:
    """An order of work. `passed` of the `queued` pieces have run."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._work: deque[Work] = deque()
        self.queued = 0
        self.passed = 0

    def add(self, work: Work) -> None:
        self._work.append(work)
        self.queued += 1

    def run_until(self, position: int) -> None:
        while self.passed < position:
            work = self._work.popleft()
            self.passed += 1
            with self._device.running():
                work()

    def synchronize(self) -> None:
        self._device.refuse_while_recording("waiting for a stream")
        self.run_until(self.queued)


@dataclass(frozen=True)
class LateEvent:
    """A point in a stream. Asking whether it has passed lets one more piece of work run."""

    stream: LateStream
    position: int

    def wait(self) -> None:
        self.stream.run_until(self.position)

    def done(self) -> bool:
        if self.stream.passed < self.position:
            self.stream.run_until(self.stream.passed + 1)
        return self.stream.passed >= self.position


@dataclass(frozen=True)
class Place:
    """A tensor on a tape: where it lies. It keeps no memory alive but what the tape allocated."""

    memory: weakref.ref[Any]
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    offset: int

    def tensor(self) -> torch.Tensor:
        memory = self.memory()
        if memory is None:
            raise AssertionError("a recording reads or writes memory that was freed after it was made")
        flat = torch.from_numpy(memory).view(self.dtype)
        return flat.as_strided(tuple(self.shape), tuple(self.stride), self.offset)


@dataclass
class LateRecording:
    """Calls in order, and the memory that was allocated while they were recorded."""

    device: LateDevice
    calls: list[tuple[Callable[..., Any], Any]]
    memory: list[Any]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        for function, places in self.calls:
            arguments = pytree.tree_map(lambda x: x.tensor() if isinstance(x, Place) else x, places)
            self.device.current.add(lambda function=function, arguments=arguments: function(*arguments))


class LateDevice:
    """
    Args:
        memory_bytes: of the device.
        refuses_recording: raised by whatever is submitted while a step is recorded.

    Attributes:
        live_bytes: device memory in use.
        current: the current stream.
        recordings: all that were made.
        is_running: queued work runs right now, and torch's ops are what they always are.
        is_recording: a step is being recorded.
        waits: how often the host waited to read a number back.
    """

    def __init__(self, memory_bytes: int = 4 << 30, refuses_recording: str = "") -> None:
        from tests.fakes.late_modes import LateModes

        self.memory_bytes = memory_bytes
        self.refuses_recording = refuses_recording
        self.live_bytes = 0
        self.current = LateStream(self)
        self.recordings: list[LateRecording] = []
        self.is_running = False
        self.is_recording = False
        self.waits = 0
        self._memory: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._tape: LateRecording | None = None
        self._modes = LateModes(self)

    def __enter__(self) -> Self:
        self._modes.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.__exit__(*error)

    # -- memory -----------------------------------------------------------------------------------------------
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.memory_bytes - self.live_bytes, self.memory_bytes)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, kind: str = "device") -> torch.Tensor:
        """Poisoned memory. Raises torch.OutOfMemoryError."""
        size_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if kind != PINNED and self.live_bytes + size_bytes > self.memory_bytes:
            raise torch.OutOfMemoryError(f"{size_bytes} bytes do not fit")
        with self.running():
            memory = np.full(max(size_bytes, 1), POISON, dtype=np.uint8)
            address = memory.ctypes.data
            counted = 0 if kind == PINNED else size_bytes
            self.live_bytes += counted
            self._memory[address] = (weakref.ref(memory, lambda _: self._freed(address, counted)), kind)
            if self._tape is not None:
                self._tape.memory.append(memory)
            return torch.from_numpy(memory)[:size_bytes].view(dtype).view(tuple(shape))

    def _freed(self, address: int, size_bytes: int) -> None:
        self.live_bytes -= size_bytes
        self._memory.pop(address, None)

    def kind(self, x: torch.Tensor) -> str:
        """ "device", "pinned" or "host"."""
        return self._memory.get(x.untyped_storage().data_ptr(), (None, "host"))[1]

    def owns(self, x: object) -> bool:
        return isinstance(x, torch.Tensor) and self.kind(x) == "device"

    # -- work -------------------------------------------------------------------------------------------------
    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Queue function(*arguments), or put it on the tape."""
        if self._tape is None:
            self.current.add(lambda: function(*arguments))
            return
        if self.refuses_recording:
            raise RuntimeError(self.refuses_recording)
        self._tape.calls.append((function, pytree.tree_map_only(torch.Tensor, self._place, arguments)))

    def _place(self, x: torch.Tensor) -> Place | torch.Tensor:
        memory, _ = self._memory.get(x.untyped_storage().data_ptr(), (None, ""))
        return x if memory is None else Place(memory, x.dtype, x.shape, x.stride(), x.storage_offset())

    def launch(self, kernel: Kernel, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        """A Launch (backends/common/launch.py). Host memory is no place for a kernel to look at."""
        for arg in args:
            if isinstance(arg, torch.Tensor) and not self.owns(arg):
                raise RuntimeError(f"kernel {kernel.__name__} was given a tensor of the host, {list(arg.shape)}")
        self.submit(lambda *tensors: launch_now(kernel, grid, *tensors, **constants), *args)

    def wait_for_all(self, what: str) -> None:
        """What reading a number back does: the current stream is waited for."""
        self.refuse_while_recording(what)
        self.waits += 1
        self.current.run_until(self.current.queued)

    def refuse_while_recording(self, what: str) -> None:
        if self.is_recording:
            raise RuntimeError(f"{what} is not permitted while a stream is recorded")

    def record(self, work: Work) -> LateRecording:
        tape = LateRecording(self, [], [])
        self._tape, self.is_recording = tape, True
        try:
            work()
        finally:
            self._tape, self.is_recording = None, False
        self.recordings.append(tape)
        return tape

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, torch's ops are done at once."""
        before, self.is_running = self.is_running, True
        try:
            yield
        finally:
            self.is_running = before


class LateRuntime:
    """A Runtime (backends/common/runtime.py) over a LateDevice."""

    is_emulated = False
    can_record = True
    transport = "gloo"
    device = DEVICE

    def __init__(self, device: LateDevice) -> None:
        self._device = device

    def memory_info(self) -> MemoryInfo:
        return self._device.memory_info()

    def versions(self) -> dict[str, str]:
        return {"runtime": "late"}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._device.allocate(shape, dtype)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return self._device.allocate((size_bytes,), torch.uint8, PINNED)

    def new_stream(self) -> LateStream:
        return LateStream(self._device)

    def use(self, stream: LateStream) -> None:
        before = self._device.current
        if before is not stream:
            stream.add(LateEvent(before, before.queued).wait)
            self._device.current = stream

    def event(self, stream: LateStream) -> LateEvent:
        self._device.refuse_while_recording("an event")
        return LateEvent(stream, stream.queued)

    def record(self, stream: LateStream, work: Work) -> LateRecording:
        assert self._device.current is stream
        return self._device.record(work)

    def trim(self) -> None:
        return

    def device_count(self) -> int:
        return 1
