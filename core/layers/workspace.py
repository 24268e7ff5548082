"""The activation buffers of a model, allocated once and used by every step.

    name        [max_rows, width]
    "hidden"    ████████████░░░░░░░░     a step of T tokens uses rows [:T]; the rest keeps old values
    "qkv"       ████████████░░░░░░░░     layers take turns: layer i + 1 overwrites what layer i left

Layers claim what they need while the model is built; asking again for a name returns the same tensor, which is how
layers share. A step only takes slices, so it never allocates and its addresses never change, as a recorded program
needs. Only the model that owns a workspace and its layers talk to it.
"""

from __future__ import annotations

import math

import torch

from octavo.core.backend.device import DeviceBackend


class Workspace:
    """Named buffers of `max_rows` rows on the backend's device.

    Args:
        backend: allocates them.
        max_rows: the largest number of tokens in a step.
    """

    def __init__(self, backend: DeviceBackend, max_rows: int) -> None:
        self.max_rows = max_rows
        self._backend = backend
        self._buffers: dict[str, torch.Tensor] = {}

    def claim(self, name: str, *row_shape: int, dtype: torch.dtype) -> torch.Tensor:
        """The buffer [max_rows, *row_shape] of that name, allocated when first claimed.

        Raises:
            ValueError: the name is in use with another shape or dtype.
        """
        shape = (self.max_rows, *row_shape)
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = self._backend.empty(*shape, dtype=dtype)
        if tuple(buffer.shape) != shape or buffer.dtype != dtype:
            raise ValueError(
                f"buffer {name!r} is {list(buffer.shape)} {buffer.dtype}, claimed as {list(shape)} {dtype}"
            )
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in self._buffers.values())
