"""The probe of backend rocm, with drivers as they are met."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.backends.common import probing
from octavo.backends.common.probing import answer
from octavo.backends.rocm import probe
from octavo.core.backend import Available, Refusal

MI300X = probing.Device("AMD Instinct MI300X", "gfx942", 192 << 30)
MI250X = probing.Device("AMD GPU", "gfx90a", 64 << 30)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter, and packages as a machine with a GPU has them."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(probing, "package_refusal", lambda: None)
    monkeypatch.setattr(probing, "build_refusal", lambda _: None)


def missing() -> list[probing.Device]:
    raise OSError("/dev/kfd is not here")


def test_a_known_chip_is_available(native: None) -> None:
    assert answer(probe.WANTED, lambda: [MI300X]) == Available("AMD Instinct MI300X (gfx942), 192 GiB")
    assert answer(probe.WANTED, lambda: [MI250X, MI300X, MI300X]) == Available(
        "2 × AMD Instinct MI300X (gfx942), 192 GiB"
    )


def test_another_architecture_is_refused_by_its_name(native: None) -> None:
    refusal = answer(probe.WANTED, lambda: [MI250X])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "it has kernels for gfx942; found here: AMD GPU (gfx90a)"
    assert refusal.remedy


def test_no_device_and_no_driver_are_told_apart(native: None) -> None:
    assert "found here: none" in str(answer(probe.WANTED, list))
    assert "no AMD GPU: /dev/kfd is not here; install" in str(answer(probe.WANTED, missing))


def test_packages_are_asked_for_only_where_there_is_a_chip(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Refusal("the package triton is missing", 'pip install "octavo[gpu]"')
    monkeypatch.setattr(probing, "package_refusal", lambda: lacking)
    assert answer(probe.WANTED, lambda: [MI300X]) == lacking
    assert "no AMD GPU" in str(answer(probe.WANTED, missing))
    monkeypatch.setattr(probing, "package_refusal", lambda: None)
    monkeypatch.setattr(probing, "build_refusal", lambda toolkit: Refusal(f"no {toolkit}"))
    assert answer(probe.WANTED, lambda: [MI300X]) == Refusal("no hip")


def test_under_the_interpreter_no_driver_is_asked() -> None:
    found = answer(probe.WANTED, missing)
    assert isinstance(found, Available)
    assert found.is_emulated
    assert found.detail == "AMD Instinct MI300X, emulated: kernels run in Triton's interpreter on the CPU"


def node(root: Path, index: int, gfx_target_version: int, memory_bytes: int) -> Path:
    folder = root / f"sys/class/kfd/kfd/topology/nodes/{index}"
    bank = folder / "mem_banks/0"
    bank.mkdir(parents=True)
    (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {gfx_target_version}\n")
    (bank / "properties").write_text(f"heap_type 1\nsize_in_bytes {memory_bytes}\nflags 0\n")
    return folder


def test_devices_are_read_from_the_drivers_topology(tmp_path: Path) -> None:
    """Node 0 is a processor; node 10 comes after 9; a node that a container withholds is no device."""
    with pytest.raises(OSError, match="/dev/kfd is not here: the driver amdgpu is not loaded"):
        probe.driver_devices(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    assert probe.driver_devices(tmp_path) == []
    node(tmp_path, 0, 0, 1 << 40)
    node(tmp_path, 10, 90010, 64 << 30)
    node(tmp_path, 9, 90402, 192 << 30)
    (node(tmp_path, 11, 90402, 192 << 30) / "properties").unlink()
    assert probe.driver_devices(tmp_path) == [MI300X, MI250X]
