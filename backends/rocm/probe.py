"""Whether an AMD chip that this backend knows can be used here. Asks the kernel driver; imports no torch, no triton."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from octavo.backends.common.probing import build_refusal, emulation, is_interpreted, package_refusal
from octavo.backends.rocm.chips import CHIPS, DEFAULT
from octavo.core.backend import Available, Refusal
from octavo.core.base.units import format_bytes

ARCHES = ("gfx942",)
"""What the kernels are cut to."""

_NODES = "sys/class/kfd/kfd/topology/nodes"


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
        return Refusal(f"no AMD GPU: {error}", "install AMD's amdgpu driver, or use another backend")
    known = [device for device in devices if device.arch in ARCHES]
    if not known:
        found = ", ".join(f"{device.name} ({device.arch})" for device in devices) or "none"
        return Refusal(f"it has kernels for {', '.join(ARCHES)}; found here: {found}", "use an MI300X")
    refusal = package_refusal() or build_refusal("hip")
    if refusal is not None:
        return refusal
    first, count = known[0], f"{len(known)} × " if len(known) > 1 else ""
    return Available(f"{count}{first.name} ({first.arch}), {format_bytes(first.memory_bytes)}")


def driver_devices(root: Path = Path("/")) -> list[Device]:
    """What the driver sees. Raises OSError."""
    if not (root / "dev/kfd").exists():
        raise OSError("/dev/kfd is not here: the driver amdgpu is not loaded, or a container withholds its device")
    nodes = sorted((root / _NODES).glob("*"), key=lambda node: (len(node.name), node.name))
    devices = [_device(node) for node in nodes]
    return [device for device in devices if device is not None]


def _device(node: Path) -> Device | None:
    """A node of the topology; None for a processor, or for a device that this container may not use."""
    facts = _properties(node / "properties")
    version = facts.get("gfx_target_version", 0)
    if not version:
        return None
    banks = [_properties(bank) for bank in (node / "mem_banks").glob("*/properties")]
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    name = next((chip.name for chip in CHIPS if chip.arch == arch), "AMD GPU")
    return Device(name, arch, sum(bank.get("size_in_bytes", 0) for bank in banks))


def _properties(file: Path) -> dict[str, int]:
    """Lines "name number"; none where the driver withholds them."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
