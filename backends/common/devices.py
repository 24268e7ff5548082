"""Which device an instance takes, and what is known of it: the same question for every vendor, by way of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from octavo.backends.common.chip import Chip
from octavo.backends.common.options import GpuOptions
from octavo.backends.common.probing import Toolkit, is_interpreted
from octavo.backends.common.runtime import HostRuntime, Runtime, TorchRuntime
from octavo.core.backend import BackendConfig
from octavo.core.base.errors import BackendUnavailable


@dataclass(frozen=True, slots=True)
class Vendor:
    """What differs.

    Attributes:
        backend: its name.
        toolkit: what torch calls the software below it.
        arches: what the kernels are cut to.
        chips, default: those with a data sheet here, and the one taken for a chip of another name.
        visible_by: the variable that hides devices from a process.
        arch_of: index of a device -> its architecture, as the compiler names it.
    """

    backend: str
    toolkit: Toolkit
    arches: tuple[str, ...]
    chips: tuple[Chip, ...]
    default: Chip
    visible_by: str
    arch_of: Callable[[int], str]


def open_device(vendor: Vendor, config: BackendConfig) -> tuple[Runtime, Chip]:
    """The device asked for, or the interpreter in its place. Raises BackendUnavailable."""
    if is_interpreted():
        return HostRuntime(), vendor.default
    options = config.options or GpuOptions()
    index = device_index(vendor, options.device, config.rank, config.world_size)
    return TorchRuntime(index, vendor.toolkit), chip_of(vendor, index)


def device_index(vendor: Vendor, first: int | None, rank: int = 0, world_size: int = 1) -> int:
    """The device of a rank: number `rank` of those of a known architecture, counted from `first` on.

    Raises BackendUnavailable for a device that can't be, and where the group has more ranks than there are devices.
    """
    arches = [vendor.arch_of(index) for index in range(torch.cuda.device_count())]
    if first is not None:
        _check_device(vendor, arches, first)
    known = [index for index in range(first or 0, len(arches)) if arches[index] in vendor.arches]
    if rank < len(known):
        return known[rank]
    if not known:
        _check_device(vendor, arches, 0)
    start = "" if first is None else f" from device {first} on"
    raise BackendUnavailable(
        f"rank {rank} of {world_size} has no device: backend {vendor.backend} finds {len(known)} that it knows{start}; "
        f"lower tensor_parallel_size to {len(known)}, or look at {vendor.visible_by}",
        field="tensor_parallel_size",
    )


def _check_device(vendor: Vendor, arches: list[str], wanted: int) -> None:
    """Raises BackendUnavailable."""
    if wanted >= len(arches):
        raise BackendUnavailable(
            f"option device of backend {vendor.backend} is {wanted}, and {len(arches)} devices are visible; take a "
            f"lower one, or look at {vendor.visible_by}",
            field="backend_option",
        )
    if arches[wanted] not in vendor.arches:
        raise BackendUnavailable(
            f"device {wanted} is {arches[wanted]}; backend {vendor.backend} has kernels for "
            f"{', '.join(vendor.arches)}: choose another by --backend-option device=N",
            field="backend_option",
        )


def chip_of(vendor: Vendor, index: int) -> Chip:
    """The chip's own figures where the device tells them, the data sheet's elsewhere."""
    properties = torch.cuda.get_device_properties(index)
    named = next((chip for chip in vendor.chips if chip.name.rpartition(" ")[2] in properties.name), vendor.default)
    return replace(
        named,
        name=properties.name,
        num_units=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
    )
