"""Device memory that ops use from call to call: it grows, and what it grew out of stays."""

from __future__ import annotations

import math

import torch


class Workspace:
    """A buffer of bytes for what lies between two kernels of one op.

    A recorded step holds the address of the buffer that it was recorded with, so an outgrown one is kept: sizes double,
    and all of them together are less than twice the last.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []

    def take(self, *pieces: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Uninitialised tensors of these shapes and dtypes, 256-byte aligned, valid until the next take."""
        ends, total = [], 0
        for shape, dtype in pieces:
            total += -(-math.prod(shape) * dtype.itemsize // 256) * 256
            ends.append(total)
        if not self._buffers or self._buffers[-1].numel() < total:
            size = max(total, 2 * self._buffers[-1].numel() if self._buffers else 0)
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        buffer, starts = self._buffers[-1], [0, *ends]
        return [
            buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, pieces, strict=False)
        ]
