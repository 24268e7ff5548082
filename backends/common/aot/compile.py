"""Compiles a recorded launch for a chip, without a device: Triton's own specialisation, with a stand-in for the driver.

What comes out is what a device of that kind would be given for the same arguments: the types, the divisibility of
pointers and strides, numbers equal to one, and tensor descriptors are read from the launch by Triton itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from octavo.backends.common.chip import Chip
from octavo.backends.common.launch import LaunchRecord
from octavo.core.base.errors import BackendUnavailable


def gpu_target(chip: Chip) -> GPUTarget:
    """The chip as Triton names it."""
    if chip.arch.startswith("sm_"):
        return GPUTarget("cuda", int(chip.arch.removeprefix("sm_")), chip.warp_size)
    return GPUTarget("hip", chip.arch, chip.warp_size)


class _AbsentDevice:
    """What Triton asks of a driver in order to compile. Nothing can be launched through it."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        """Triton keeps compiled kernels by device, so that each target needs a number of its own."""
        return hash((self._target.backend, self._target.arch)) & 0xFFFF

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def is_active(self) -> bool:
        return True


@contextmanager
def absent_device(chip: Chip) -> Iterator[None]:
    """Within, Triton compiles for this chip. Raises BackendUnavailable under the interpreter."""
    if triton.knobs.runtime.interpret:
        raise BackendUnavailable("kernels are interpreted; unset TRITON_INTERPRET to compile them")
    driver.set_active(_AbsentDevice(gpu_target(chip)))
    try:
        yield
    finally:
        with suppress(RuntimeError):  # no device here: there is no driver to go back to, and nothing that would need it
            driver.reset_active()


def compile_launch(record: LaunchRecord, chip: Chip) -> Any:
    """The compiled kernel (triton's CompiledKernel: `asm`, `metadata`). Raises what the compiler raises."""
    with absent_device(chip):
        return record.kernel.warmup(*record.args, grid=record.grid, **record.constants)
