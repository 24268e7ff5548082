"""Whether an AMD chip that this backend knows can be used here. Asks the kernel driver; imports no torch, no triton."""

from __future__ import annotations

from pathlib import Path

from octavo.backends.common.probing import Device, Wanted, answer
from octavo.backends.rocm.chips import CHIPS, DEFAULT
from octavo.core.backend import Available, Refusal

ARCHES = ("gfx942",)
"""What the kernels are cut to."""

WANTED = Wanted("AMD", ARCHES, "an MI300X", "AMD's amdgpu driver", "hip", DEFAULT.name)

_NODES = "sys/class/kfd/kfd/topology/nodes"


def probe() -> Available | Refusal:
    """The first chip of a known architecture, or why there is none."""
    return answer(WANTED, driver_devices)


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
