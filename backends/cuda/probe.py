"""Whether an NVIDIA chip that this backend knows can be used here. Asks the driver; imports no torch and no triton."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

from octavo.backends.common.probing import build_refusal, emulation, is_interpreted, package_refusal
from octavo.backends.cuda.chips import DEFAULT
from octavo.core.backend import Available, Refusal
from octavo.core.base.units import format_bytes

ARCHES = ("sm_90",)
"""What the kernels are cut to."""

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*"""


class Device(NamedTuple):
    """One device as the driver describes it."""

    name: str
    arch: str
    memory_bytes: int


class Driver(Protocol):
    """Lists the devices that this process may use. Raises OSError saying what is wrong."""

    def __call__(self) -> list[Device]: ...


def probe() -> Available | Refusal:
    """The first chip of a known architecture, or why there is none."""
    return answer(driver_devices)


def answer(driver: Driver) -> Available | Refusal:
    """`probe`, given a driver. Under Triton's interpreter none is asked."""
    if is_interpreted():
        return package_refusal() or emulation(DEFAULT.name)
    try:
        devices = driver()
    except OSError as error:
        return Refusal(f"no NVIDIA GPU: {error}", "install NVIDIA's driver, or use another backend")
    known = [device for device in devices if device.arch in ARCHES]
    if not known:
        found = ", ".join(f"{device.name} ({device.arch})" for device in devices) or "none"
        return Refusal(f"it has kernels for {', '.join(ARCHES)}; found here: {found}", "use an H100 or H200")
    refusal = package_refusal() or build_refusal("cuda")
    if refusal is not None:
        return refusal
    first, count = known[0], f"{len(known)} × " if len(known) > 1 else ""
    return Available(f"{count}{first.name} ({first.arch}), {format_bytes(first.memory_bytes)}")


def driver_devices() -> list[Device]:
    """What the driver sees, CUDA_VISIBLE_DEVICES heeded. Raises OSError."""
    try:
        cuda = ctypes.CDLL(_DRIVER)
    except OSError:
        raise OSError(f"the driver's library {_DRIVER} is not here") from None
    _checked(cuda, cuda.cuInit(0))
    count = ctypes.c_int()
    _checked(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)))
    return [_device(cuda, ordinal) for ordinal in range(count.value)]


def _device(cuda: ctypes.CDLL, ordinal: int) -> Device:
    handle, value, memory, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _checked(cuda, cuda.cuDeviceGet(ctypes.byref(handle), ordinal))
    _checked(cuda, cuda.cuDeviceGetName(name, len(name), handle))
    _checked(cuda, cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), handle))
    capability = []
    for attribute in (_MAJOR, _MINOR):
        _checked(cuda, cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle))
        capability.append(value.value)
    return Device(name.value.decode(errors="replace"), f"sm_{capability[0]}{capability[1]}", memory.value)


def _checked(cuda: ctypes.CDLL, code: int) -> None:
    """Raises OSError with the driver's own words for a result other than success."""
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"the driver answers {(text.value or b'an unknown error').decode()} (error {code})")
