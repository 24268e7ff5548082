"""Ops of GPU backends on the CPU, interpreted: one device of each vendor, with the vendor's own launch parameters."""

from __future__ import annotations

import importlib
import importlib.resources

import pytest
import torch

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.launch import launch
from octavo.backends.common.tuning import TuningTable
from octavo.core.backend.reference.ops import ReferenceOps


def gpu_of(vendor: str) -> Gpu:
    """The vendor's default chip; its kernels run in the interpreter."""
    chips = importlib.import_module(f"octavo.backends.{vendor}.chips")
    tuning = TuningTable.load(importlib.resources.files(f"octavo.backends.{vendor}") / "tuning")
    return Gpu(torch.device("cpu"), chips.DEFAULT, launch, tuning)


@pytest.fixture(params=["cuda", "rocm"])
def gpu(request: pytest.FixtureRequest) -> Gpu:
    return gpu_of(request.param)


@pytest.fixture(scope="session")
def reference() -> ReferenceOps:
    return ReferenceOps(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)
