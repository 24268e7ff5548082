"""Backend rocm under Triton's interpreter, and how it picks a device where there are some."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.backends.common.devices import chip_of, device_index
from octavo.backends.rocm.chips import CHIPS, DEFAULT
from octavo.backends.rocm.device import VENDOR
from octavo.core.backend import BackendRegistry
from octavo.core.backend.selfcheck import device_fault
from octavo.core.base.errors import BackendUnavailable, ConfigError

MI250X, MI300X = (
    ("AMD Instinct MI250X", "gfx90a:sramecc+:xnack-"),
    ("AMD Instinct MI300X OAM", "gfx942:sramecc+:xnack-"),
)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees an MI250X and two MI300X."""
    there = [MI250X, MI300X, MI300X]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(there))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name=there[index][0], gcnArchName=there[index][1], multi_processor_count=228, total_memory=191 << 30
        ),
    )


def test_emulated_it_is_whole_and_says_what_it_is() -> None:
    registry = BackendRegistry.discover()
    backend = registry.create(registry.choose("rocm"), deterministic=True)
    facts = backend.capabilities
    assert device_fault("rocm", backend) is None
    assert (facts.is_emulated, facts.graphs, facts.batch_invariant) == (True, False, True)
    assert (facts.arch, facts.fp8, facts.device_name) == ("gfx942", "e4m3fnuz", "AMD Instinct MI300X, emulated")
    assert torch.float8_e4m3fnuz in facts.kv_dtypes
    assert facts.versions["triton"]
    assert facts.world_sizes == (1, 2, 4, 8)
    backend.close()


def test_options_are_typed() -> None:
    registry = BackendRegistry.discover()
    with pytest.raises(ConfigError, match="backend rocm has no option graph: did you mean graphs"):
        registry.create(registry.choose("rocm"), {"graph": "off"})


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
    with pytest.raises(BackendUnavailable, match="device 0 is gfx90a; backend rocm has kernels for gfx942: choose"):
        device_index(VENDOR, 0)
    with pytest.raises(BackendUnavailable, match="option device of backend rocm is 3, and 3 devices are visible"):
        device_index(VENDOR, 3)


def test_the_device_tells_its_own_figures_and_the_data_sheet_the_rest(devices: None) -> None:
    chip = chip_of(VENDOR, 1)
    assert (chip.name, chip.num_units, chip.memory_bytes) == ("AMD Instinct MI300X OAM", 228, 191 << 30)
    assert chip.bandwidth_bytes_per_s == CHIPS[0].bandwidth_bytes_per_s
    assert chip_of(VENDOR, 0).flops == DEFAULT.flops  # of another name
