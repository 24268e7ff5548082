"""What the device layer needs of the software below it, behind one seam: streams, memory, recording.

    GpuBackend (device.py) ──► Runtime ──┬── TorchRuntime    torch's device module, which serves CUDA and ROCm alike
    GraphProgram (graphs.py) ──┘         ├── HostRuntime     the CPU, where Triton's interpreter runs the kernels
                                         └── tests/fakes     a device whose work runs late, so that order shows

Work goes to the calling thread's current stream, as everything of torch and Triton does. A backend owns one stream and
`use`s it at each of its calls, so that what the engine does between them goes there too; whatever stream was current
is waited for, on the device. So two engines in a process keep apart, and a caller's own work stays in order with them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.backends.common.probing import Toolkit, torch_builds
from octavo.core.backend import Event, MemoryInfo
from octavo.core.base.host import host_memory


class Recording(Protocol):
    """Work that was recorded once."""

    def replay(self) -> None:
        """Queue it again on the current stream: the same kernels, on the same addresses."""


class Stream(Protocol):
    """An order of work of one device."""

    def synchronize(self) -> None:
        """Return when all its work is done."""


class Runtime(Protocol):
    """One device as its vendor's software shows it.

    Attributes:
        device: where tensors live.
        is_emulated: there is no device; the host does its work.
        can_record: whether `record` works.
        transport: what process groups send tensors over ("nccl", "gloo").
    """

    device: torch.device
    is_emulated: bool
    can_record: bool
    transport: str

    def memory_info(self) -> MemoryInfo:
        """Free and total bytes; memory that torch keeps for reuse counts as free."""

    def versions(self) -> dict[str, str]:
        """Of what lies below the backend: "driver", "runtime", "torch", "triton"."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised device tensor. Raises torch.OutOfMemoryError."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Host memory, flat uint8, that copies run from and to without waiting."""

    def new_stream(self) -> Stream:
        """A stream of the caller's own."""

    def use(self, stream: Stream) -> None:
        """Make `stream` the current one of this thread, behind all that was queued on the one before."""

    def event(self, stream: Stream) -> Event:
        """The point after all that is queued on `stream` now."""

    def record(self, stream: Stream, work: Callable[[], None]) -> Recording:
        """Record what `work` queues, without running it; `stream` is current. Memory that it allocates stays.

        Raises RuntimeError for work that can't be recorded; the stream then is as it was.
        """

    def trim(self) -> None:
        """Give memory that torch keeps for reuse back to the device."""

    def device_count(self) -> int:
        """Devices that this process sees."""


class TorchRuntime:
    """A CUDA or ROCm device by way of torch.cuda, which is the name of both."""

    is_emulated = False
    can_record = True
    transport = "nccl"

    def __init__(self, index: int, toolkit: Toolkit) -> None:
        self.device = torch.device("cuda", index)
        self._toolkit = toolkit
        self._pool = torch.cuda.graph_pool_handle()
        # The vendor's products may otherwise add parts of a sum in 16 bits. Torch has the switch for a process only.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def memory_info(self) -> MemoryInfo:
        free, total = torch.cuda.mem_get_info(self.device)
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return MemoryInfo(min(free + kept, total), total)

    def versions(self) -> dict[str, str]:
        found = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        found["runtime"] = torch_builds().get(self._toolkit, "unknown")
        return found | self._driver()

    def _driver(self) -> dict[str, str]:
        """As the kernel module names itself; nothing where it does not."""
        module = {"cuda": "nvidia", "hip": "amdgpu"}[self._toolkit]
        with contextlib.suppress(OSError):
            return {"driver": Path("/sys/module", module, "version").read_text().strip()}
        return {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def new_stream(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def use(self, stream: Any) -> None:
        before = torch.cuda.current_stream(self.device)
        if before != stream:
            stream.wait_stream(before)
        elif torch.cuda.current_device() == self.device.index:
            return
        torch.cuda.set_stream(stream)  # its device becomes the current one too, which Triton and NCCL look at

    def event(self, stream: Any) -> Event:
        return _TorchEvent(stream.record_event())

    def record(self, stream: Any, work: Callable[[], None]) -> Recording:
        graph = torch.cuda.CUDAGraph()
        stream.synchronize()
        with _no_collector():
            # Another thread's engine may allocate meanwhile: only this thread is held to what a recording allows.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def device_count(self) -> int:
        return torch.cuda.device_count()


class _TorchEvent:
    """An Event of the contract over torch's."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def done(self) -> bool:
        return bool(self._event.query())


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Python's collector could free another engine's memory in the middle of a recording, which ends it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class HostRuntime:
    """The CPU under Triton's interpreter: everything is done when the call returns."""

    is_emulated = True
    can_record = False
    transport = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def memory_info(self) -> MemoryInfo:
        memory = host_memory()
        return MemoryInfo(memory.free_bytes, memory.total_bytes)

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("torch", "triton")}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def new_stream(self) -> Stream:
        return _Done()

    def use(self, stream: Stream) -> None:
        return

    def event(self, stream: Stream) -> Event:
        return _Done()

    def record(self, stream: Stream, work: Callable[[], None]) -> Recording:
        raise RuntimeError("Triton's interpreter records nothing")

    def trim(self) -> None:
        return

    def device_count(self) -> int:
        return 1


class _Done:
    """A stream and an event of a device that is never behind."""

    def synchronize(self) -> None:
        return

    def wait(self) -> None:
        return

    def done(self) -> bool:
        return True
