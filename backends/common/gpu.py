"""What the op groups of a GPU backend know of their device: one value, made by the device, given to each group."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.backends.common.chip import Chip
from octavo.backends.common.launch import Launch
from octavo.backends.common.tuning import TuningTable


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as its ops see it.

    Attributes:
        device: where tensors live; the CPU under the interpreter, "meta" while launches are recorded.
        chip: sizes and limits.
        launch: starts kernels.
        tuning: launch parameters.
        deterministic: a row's bits must not depend on the other rows of its batch: splits and tiles are then chosen
            from what a request alone fixes.
    """

    device: torch.device
    chip: Chip
    launch: Launch
    tuning: TuningTable
    deterministic: bool = False
