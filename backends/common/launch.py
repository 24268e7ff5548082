"""How kernels are started: at once, or noted down.

    op ──► gpu.launch(kernel, grid, *tensors and numbers, **constexprs and options)
              ├── launch           Triton compiles the kernel for these arguments if it must, and queues it
              └── Recorder         keeps the call: what to compile ahead of time, what a step would move and multiply

Every kernel of a backend starts through its `Gpu.launch`, so that a list of launches is the truth about a step: there
is no second list of kernels to keep in step with the code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol


class Kernel(Protocol):
    """A function under @triton.jit."""

    __name__: str
    params: list[Any]

    def __getitem__(self, grid: tuple[int, ...]) -> Any: ...

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Any: ...


class Launch(Protocol):
    """Starts a kernel over a grid of programs. An empty grid starts nothing."""

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None: ...


def launch(kernel: Kernel, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
    """Queue the kernel on the device's current stream, or run it in the interpreter."""
    if math.prod(grid):
        kernel[grid](*args, **constants)


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One start of a kernel.

    Attributes:
        args: tensors, tensor descriptors and numbers, in the kernel's order.
        constants: constexprs by name, and the compiler's options (num_warps, …).
    """

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


@dataclass(slots=True)
class Recorder:
    """A Launch that runs nothing. Tensors may be on the meta device."""

    records: list[LaunchRecord] = field(default_factory=list)

    def __call__(self, kernel: Kernel, grid: tuple[int, ...], /, *args: Any, **constants: Any) -> None:
        if math.prod(grid):
            self.records.append(LaunchRecord(kernel, grid, args, constants))
