"""Backend cuda under Triton's interpreter, and how it picks a device where there are some."""

from __future__ import annotations

from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch

from octavo.backends.common.devices import chip_of, device_index
from octavo.backends.common.tuning import TuningTable
from octavo.backends.cuda.chips import CHIPS, DEFAULT
from octavo.backends.cuda.device import VENDOR
from octavo.conformance.lanes.accumulation import CLASSES
from octavo.core.backend import BackendRegistry
from octavo.core.backend.selfcheck import device_fault
from octavo.core.base.errors import BackendUnavailable, ConfigError

A100, H100, H200 = ("NVIDIA A100", (8, 0)), ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA H200", (9, 0))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees an A100, an H100 and an H200."""
    there = [A100, H100, H200]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: there[index][1])
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=there[index][0], multi_processor_count=114, total_memory=79 << 30),
    )


def test_emulated_it_is_whole_and_says_what_it_is() -> None:
    registry = BackendRegistry.discover()
    backend = registry.create(registry.choose("cuda"), deterministic=True)
    facts = backend.capabilities
    assert device_fault("cuda", backend) is None
    assert (facts.is_emulated, facts.graphs, facts.batch_invariant) == (True, False, True)
    assert (facts.arch, facts.fp8, facts.device_name) == ("sm_90", "e4m3fn", "NVIDIA H200, emulated")
    assert torch.float8_e4m3fn in facts.kv_dtypes
    assert facts.versions["triton"]
    assert facts.world_sizes == (1, 2, 4, 8)
    assert facts.accumulation["gemm/float8"] == "fp32"  # the interpreter's
    backend.close()


def test_8_bit_floats_are_promoted_as_often_as_the_declared_class_says() -> None:
    """tests/conformance/test_accumulation.py holds the class against a model of the tensor cores."""
    run = CLASSES[DEFAULT.fp8_accumulation].run
    table = TuningTable.load(files("octavo.backends.cuda") / "tuning")
    entries = [entry for kernel in ("gemm_scaled", "grouped_scaled") for entry in table.by_kernel[kernel]]
    assert all(0 < entry.tile["PROMOTE"] <= run for entry in entries)
    assert {chip.fp8_accumulation for chip in CHIPS} == {DEFAULT.fp8_accumulation}


def test_options_are_typed() -> None:
    registry = BackendRegistry.discover()
    with pytest.raises(ConfigError, match="backend cuda has no option graph: did you mean graphs"):
        registry.create(registry.choose("cuda"), {"graph": "off"})


def test_the_first_known_chip_is_taken(devices: None) -> None:
    assert device_index(VENDOR, None) == 1
    assert device_index(VENDOR, 2) == 2


def test_each_rank_takes_the_next_known_chip(devices: None) -> None:
    assert [device_index(VENDOR, None, rank, 2) for rank in (0, 1)] == [1, 2]
    assert device_index(VENDOR, 2, 0, 2) == 2
    with pytest.raises(BackendUnavailable, match=r"rank 2 of 4 has no device: .* finds 2 that it knows; lower tensor"):
        device_index(VENDOR, None, 2, 4)
    with pytest.raises(BackendUnavailable, match="finds 1 that it knows from device 2 on; lower") as error:
        device_index(VENDOR, 2, 1, 2)
    assert error.value.field == "tensor_parallel_size"


def test_a_device_that_cant_be_is_refused(devices: None) -> None:
    with pytest.raises(BackendUnavailable, match="device 0 is sm_80; backend cuda has kernels for sm_90: choose"):
        device_index(VENDOR, 0)
    with pytest.raises(BackendUnavailable, match="option device of backend cuda is 3, and 3 devices are visible"):
        device_index(VENDOR, 3)


def test_the_device_tells_its_own_figures_and_the_data_sheet_the_rest(devices: None) -> None:
    chip = chip_of(VENDOR, 1)
    assert (chip.name, chip.num_units, chip.memory_bytes) == ("NVIDIA H100 80GB HBM3", 114, 79 << 30)
    sheets = {sheet.name: sheet for sheet in CHIPS}
    assert chip.bandwidth_bytes_per_s == sheets["NVIDIA H100"].bandwidth_bytes_per_s
    assert chip_of(VENDOR, 2).bandwidth_bytes_per_s == sheets["NVIDIA H200"].bandwidth_bytes_per_s
    assert chip_of(VENDOR, 0).flops == DEFAULT.flops  # a Hopper of another name
