"""One tensor on the device, between guard bands, in a flat buffer of bytes.

    | 0xFF × GUARD | offset | element . gap . element . … | 0xFF × GUARD |
                      poison            poison

The host keeps the image that was sent. Afterwards everything but the elements of an output must be as it was sent:
one comparison covers guard bands, gaps and inputs.
"""

from __future__ import annotations

import torch

from octavo.conformance.harness.poison import Poison, as_words
from octavo.conformance.trial import HostTensor, Role
from octavo.core.backend import DeviceBackend

GUARD_BYTES = 1024
"""A multiple of every alignment that a kernel may expect of a tensor."""

GUARD_VALUE = 0xFF


class GuardedBuffer:
    """A host tensor's copy on the device.

    Attributes:
        view: the device tensor that the op is given.
    """

    def __init__(self, tensor: HostTensor, backend: DeviceBackend, poison: Poison) -> None:
        self.tensor = tensor
        self._strides = tensor.strides if tensor.strides is not None else _contiguous(tensor.shape)
        self._extent = _extent(tensor.shape, self._strides, tensor.offset)
        self._image = self._make_image(poison)
        self._flat = backend.from_host(self._image.clone())
        self.view = self._view_of(self._flat)

    def read(self, backend: DeviceBackend) -> tuple[torch.Tensor, list[str]]:
        """The elements now, contiguous on the host, and what was changed that must not be."""
        after = backend.to_host(self._flat)
        faults = []
        if not after.is_cpu or after.shape != self._image.shape or after.dtype != torch.uint8:
            return self._view_of(self._image).clone(), [f"to_host gave {list(after.shape)} {after.dtype}"]
        elements = self._view_of(after).clone(memory_format=torch.contiguous_format)
        expected = self._image.clone()
        if self.tensor.role is not Role.GIVEN:
            self._view_of(expected).copy_(self._view_of(after))
        changed = (after != expected).nonzero()
        if changed.numel():
            faults.append(self._describe(changed.squeeze(1)))
        return elements, faults

    def unwritten(self, elements: torch.Tensor, poison: Poison) -> int:
        """How many elements of a wanted tensor still hold the poison.

        Of one byte every pattern may be a result; what isn't written differs between the two poisons all the same.
        """
        if self.tensor.role is not Role.WANTED or not elements.numel() or elements.dtype.itemsize == 1:
            return 0
        return int((as_words(elements) == as_words(poison.pattern(elements.dtype).view(elements.dtype))).sum())

    def _make_image(self, poison: Poison) -> torch.Tensor:
        tensor = self.tensor
        body = poison.filled((self._extent,), tensor.dtype)
        image = torch.full((body.nbytes + 2 * GUARD_BYTES,), GUARD_VALUE, dtype=torch.uint8)
        image[GUARD_BYTES : GUARD_BYTES + body.nbytes] = body.view(torch.uint8) if body.numel() else image[:0]
        if tensor.data is not None and tensor.data.numel():
            self._view_of(image).copy_(tensor.data)
        return image

    def _view_of(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = self.tensor
        nbytes = self._extent * tensor.dtype.itemsize
        body = flat[GUARD_BYTES : GUARD_BYTES + nbytes].view(tensor.dtype)
        if not self._extent:
            return body.view(tensor.shape)
        return body[tensor.offset :].as_strided(tensor.shape, self._strides)

    def _describe(self, changed: torch.Tensor) -> str:
        first, last = int(changed[0]) - GUARD_BYTES, int(changed[-1]) - GUARD_BYTES
        nbytes = self._extent * self.tensor.dtype.itemsize
        where = "the input itself" if self.tensor.role is Role.GIVEN else "a gap between its rows"
        if first < 0 or last >= nbytes:
            where = f"the guard band {'before' if first < 0 else 'after'} it"
        return f"{self.tensor.name}: {changed.numel()} bytes of {where} were overwritten, bytes {first} to {last}"


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> int:
    """Elements from the buffer's first to the tensor's last; 0 for a tensor without elements."""
    if 0 in shape:
        return 0
    return offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
