"""CudaBackend: an NVIDIA GPU as a device. What it shares with other GPUs is backends/common/device.py."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import torch

from octavo.backends.common.chip import Chip
from octavo.backends.common.device import GpuBackend
from octavo.backends.common.options import GpuOptions
from octavo.backends.common.probing import is_interpreted
from octavo.backends.common.runtime import HostRuntime, Runtime, TorchRuntime
from octavo.backends.common.tuning import TuningTable
from octavo.backends.cuda.chips import CHIPS, DEFAULT
from octavo.backends.cuda.ops import make_ops
from octavo.backends.cuda.probe import ARCHES
from octavo.core.backend import BackendConfig
from octavo.core.base.errors import BackendUnavailable


class CudaBackend(GpuBackend):
    """An H100 or H200, or Triton's interpreter in its place."""

    name = "cuda"

    def __init__(self, config: BackendConfig) -> None:
        """Raises BackendUnavailable for a device that isn't there, or that the kernels weren't cut to."""
        options = config.options or GpuOptions()
        runtime: Runtime
        if is_interpreted():
            runtime, chip = HostRuntime(), DEFAULT
        else:
            index = device_index(options.device)
            runtime, chip = TorchRuntime(index, "cuda"), chip_of(index)
        super().__init__(config, runtime, chip, TuningTable.load(files(__package__) / "tuning"), make_ops)


def device_index(wanted: int | None) -> int:
    """The device asked for, or the first of a known architecture."""
    arches = [arch_of(index) for index in range(torch.cuda.device_count())]
    if wanted is None:
        wanted = next((index for index, arch in enumerate(arches) if arch in ARCHES), 0)
    if wanted >= len(arches):
        raise BackendUnavailable(
            f"option device of backend cuda is {wanted}, and {len(arches)} devices are visible; take a lower one, or "
            "look at CUDA_VISIBLE_DEVICES",
            field="backend_option",
        )
    if arches[wanted] not in ARCHES:
        raise BackendUnavailable(
            f"device {wanted} is {arches[wanted]}; backend cuda has kernels for {', '.join(ARCHES)}: choose another by "
            "--backend-option device=N",
            field="backend_option",
        )
    return wanted


def arch_of(index: int) -> str:
    """The architecture as its compiler names it."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def chip_of(index: int) -> Chip:
    """The chip's own figures where the device tells them, the data sheet's elsewhere."""
    properties = torch.cuda.get_device_properties(index)
    named = next((chip for chip in CHIPS if chip.name.rpartition(" ")[2] in properties.name), DEFAULT)
    return replace(
        named,
        name=properties.name,
        num_units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )
