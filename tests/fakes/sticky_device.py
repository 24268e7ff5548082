"""A device that one launch parameter breaks for good, as an illegal access does: for tuning, in a process of its own.

BLOCK 32 breaks it: from then on everything that its process asks of it fails. num_stages 6 never answers, num_warps 16
ends the process at once. Time is a formula: fastest at BLOCK 64, 8 warps and 4 stages.
"""

from __future__ import annotations

import math
import os
import time

import torch

from octavo.backends.common.tune_bench import Bench, Subject
from octavo.backends.common.tuning import Entry, TuningTable
from octavo.core.base.errors import BackendUnavailable

ENTRIES = [
    Entry("gemm", {"m": (1, 16)}, {"BLOCK": 16}, {"num_warps": 2, "num_stages": 2}, "model", "gemm.toml"),
    Entry("gemm", {}, {"BLOCK": 128}, {"num_warps": 8, "num_stages": 4}, "model", "gemm.toml"),
    Entry("norm", {}, {"BLOCK": 32}, {"num_warps": 8, "num_stages": 4}, "model", "norm.toml"),
]


def formula(entry: Entry) -> float:
    """Seconds."""
    tile, options = entry.tile, entry.options
    off = math.log2(tile["BLOCK"] / 64), math.log2(options["num_warps"] / 8), options["num_stages"] - 4
    return 1e-3 * (1 + sum(distance**2 for distance in off))


class StickyDevice:
    """Its error stays."""

    def __init__(self) -> None:
        self._is_lost = False

    def launch(self, entry: Entry) -> None:
        self.check()
        if entry.options["num_warps"] == 16:
            os._exit(139)
        if entry.options["num_stages"] == 6:
            time.sleep(3600)
        self._is_lost = entry.tile["BLOCK"] == 32
        self.check()

    def check(self) -> None:
        if self._is_lost:
            raise RuntimeError("an illegal memory access was encountered")


class StickyTrial:
    """A workload of one kernel, m rows."""

    def __init__(self, device: StickyDevice, kernel: str, m: int) -> None:
        self.name = f"{kernel}-m{m}"
        self._device = device
        self._kernel = kernel
        self._m = m

    def call(self, table: TuningTable) -> torch.Tensor:
        self._device.launch(table.pick(self._kernel, m=self._m))
        return torch.ones(4)

    def seconds(self, table: TuningTable) -> float:
        return formula(table.pick(self._kernel, m=self._m))

    def release(self) -> None:
        return


def make_bench() -> Bench:
    """In the process that measures."""
    device = StickyDevice()
    trials = [StickyTrial(device, kernel, m) for kernel, m in (("norm", 1), ("gemm", 8), ("gemm", 100))]
    return Bench(Subject("sticky", "a sticky device", (), ()), TuningTable(ENTRIES), trials, device.check)


def make_none() -> Bench:
    raise BackendUnavailable("no device is here; plug one in", field="backend")
