"""RocmBackend: an AMD GPU as a device. What it shares with other GPUs is backends/common/device.py."""

from __future__ import annotations

from importlib.resources import files

import torch

from octavo.backends.common.device import GpuBackend
from octavo.backends.common.devices import Vendor, open_device
from octavo.backends.common.tuning import TuningTable
from octavo.backends.rocm.chips import CHIPS, DEFAULT
from octavo.backends.rocm.ops import make_ops
from octavo.backends.rocm.probe import ARCHES
from octavo.core.backend import BackendConfig


class RocmBackend(GpuBackend):
    """An MI300X, or Triton's interpreter in its place."""

    name = "rocm"

    def __init__(self, config: BackendConfig) -> None:
        """Raises BackendUnavailable for a device that isn't there, or that the kernels weren't cut to."""
        runtime, chip = open_device(VENDOR, config)
        super().__init__(config, runtime, chip, TuningTable.load(files(__package__) / "tuning"), make_ops)


def arch_of(index: int) -> str:
    """Without the features behind the colon."""
    return str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0]


VENDOR = Vendor("rocm", "hip", ARCHES, CHIPS, DEFAULT, "HIP_VISIBLE_DEVICES", arch_of)
