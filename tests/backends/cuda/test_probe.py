"""The probe of backend cuda, with drivers as they are met."""

from __future__ import annotations

import pytest

from octavo.backends.common import probing
from octavo.backends.common.probing import answer
from octavo.backends.cuda import probe
from octavo.core.backend import Available, Refusal

H200 = probing.Device("NVIDIA H200", "sm_90", 150 << 30)
A100 = probing.Device("NVIDIA A100-SXM4-80GB", "sm_80", 80 << 30)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interpreter, and packages as a machine with a GPU has them."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(probing, "package_refusal", lambda: None)
    monkeypatch.setattr(probing, "build_refusal", lambda _: None)


def missing() -> list[probing.Device]:
    raise OSError("the driver's library libcuda.so.1 is not here")


def test_a_known_chip_is_available(native: None) -> None:
    assert answer(probe.WANTED, lambda: [H200]) == Available("NVIDIA H200 (sm_90), 150 GiB")
    assert answer(probe.WANTED, lambda: [A100, H200, H200]) == Available("2 × NVIDIA H200 (sm_90), 150 GiB")


def test_another_architecture_is_refused_by_its_name(native: None) -> None:
    refusal = answer(probe.WANTED, lambda: [A100])
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "it has kernels for sm_90; found here: NVIDIA A100-SXM4-80GB (sm_80)"
    assert refusal.remedy


def test_no_device_and_no_driver_are_told_apart(native: None) -> None:
    assert "found here: none" in str(answer(probe.WANTED, list))
    assert "no NVIDIA GPU: the driver's library libcuda.so.1 is not here; install" in str(answer(probe.WANTED, missing))


def test_packages_are_asked_for_only_where_there_is_a_chip(native: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Refusal("the package triton is missing", 'pip install "octavo[gpu]"')
    monkeypatch.setattr(probing, "package_refusal", lambda: lacking)
    assert answer(probe.WANTED, lambda: [H200]) == lacking
    assert "no NVIDIA GPU" in str(answer(probe.WANTED, missing))
    monkeypatch.setattr(probing, "package_refusal", lambda: None)
    monkeypatch.setattr(probing, "build_refusal", lambda toolkit: Refusal(f"no {toolkit}"))
    assert answer(probe.WANTED, lambda: [H200]) == Refusal("no cuda")


def test_under_the_interpreter_no_driver_is_asked() -> None:
    found = answer(probe.WANTED, missing)
    assert isinstance(found, Available)
    assert found.is_emulated
    assert found.detail == "NVIDIA H200, emulated: kernels run in Triton's interpreter on the CPU"


class Driver:
    """libcuda with one device, or with an error at one call."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def __getattr__(self, name: str) -> object:
        return lambda *args: 100 if name == self._fails else self._call(name, args)

    def _call(self, name: str, args: tuple[object, ...]) -> int:
        values = {"cuDeviceGetCount": 1, "cuDeviceTotalMem_v2": 150 << 30, "cuDeviceGet": 0}
        if name in values:
            args[0]._obj.value = values[name]  # type: ignore[attr-defined]
        elif name == "cuDeviceGetName":
            args[0].value = b"NVIDIA H200"  # type: ignore[attr-defined]
        elif name == "cuDeviceGetAttribute":
            args[0]._obj.value = {75: 9, 76: 0}[args[1]]  # type: ignore[attr-defined, index]
        elif name == "cuGetErrorString":
            args[1]._obj.value = b"no CUDA-capable device is detected"  # type: ignore[attr-defined]
        return 0


def test_the_driver_is_asked_for_name_architecture_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda _: Driver())
    assert probe.driver_devices() == [H200]


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGetName"])
def test_the_drivers_own_words_are_passed_on(native: None, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(probe.ctypes, "CDLL", lambda _: Driver(fails=call))
    assert "the driver answers no CUDA-capable device is detected (error 100)" in str(
        answer(probe.WANTED, probe.driver_devices)
    )
