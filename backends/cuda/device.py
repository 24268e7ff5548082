"""CudaBackend: an NVIDIA GPU as a device. What it shares with other GPUs is backends/common/device.py."""

from __future__ import annotations

from importlib.resources import files

import torch

from octavo.backends.common.device import GpuBackend
from octavo.backends.common.devices import Vendor, open_device
from octavo.backends.common.tuning import TuningTable
from octavo.backends.cuda.chips import CHIPS, DEFAULT
from octavo.backends.cuda.ops import make_ops
from octavo.backends.cuda.probe import ARCHES
from octavo.core.backend import BackendConfig


class CudaBackend(GpuBackend):
    """An H100 or H200, or Triton's interpreter in its place."""

    name = "cuda"

    def __init__(self, config: BackendConfig) -> None:
        """Raises BackendUnavailable for a device that isn't there, or that the kernels weren't cut to."""
        runtime, chip = open_device(VENDOR, config)
        super().__init__(config, runtime, chip, TuningTable.load(files(__package__) / "tuning"), make_ops)


def arch_of(index: int) -> str:
    """By its compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


VENDOR = Vendor("cuda", "cuda", ARCHES, CHIPS, DEFAULT, "CUDA_VISIBLE_DEVICES", arch_of)
