"""Whether an NVIDIA chip that this backend knows can be used here. Asks the driver; imports no torch and no triton."""

from __future__ import annotations

import ctypes

from octavo.backends.common.probing import Device, Wanted, answer
from octavo.backends.cuda.chips import DEFAULT
from octavo.core.backend import Available, Refusal

ARCHES = ("sm_90",)
"""What the kernels are cut to."""

WANTED = Wanted("NVIDIA", ARCHES, "an H100 or H200", "NVIDIA's driver", "cuda", DEFAULT.name)

_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*"""


def probe() -> Available | Refusal:
    """The first chip of a known architecture, or why there is none."""
    return answer(WANTED, driver_devices)


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
