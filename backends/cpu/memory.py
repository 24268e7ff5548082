"""Zeroed memory for weights, carved one after another from large mappings in huge pages.

    mapping (64 MiB, or one larger weight)
    ┌────────┬─────────┬──────────┬╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
    │ weight │ weight  │  weight  │ never touched, so it takes no memory
    └────────┴─────────┴──────────┴╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
    ^ 2 MiB boundary

A product with few rows streams every weight from memory once a step. In 4 KiB pages half of the time goes into
translating addresses: huge pages raise a stream from 24 to 32 GB/s on the reference machine. Most weights are smaller
than a huge page, so they share them. A mapping is given back when the last weight in it is. Only GemmOps uses this.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20
MAPPING_BYTES = 64 << 20
ALIGNMENT_BYTES = 64


class WeightArena:
    """One engine's weights."""

    def __init__(self) -> None:
        self._mapping = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor, aligned to cache lines; it keeps its mapping alive."""
        wanted = math.prod(shape) * dtype.itemsize
        if self._used_bytes + wanted > self._mapping.numel():
            self._mapping = _huge_mapping(max(wanted, MAPPING_BYTES))
            self._used_bytes = 0
        part = self._mapping[self._used_bytes : self._used_bytes + wanted]
        self._used_bytes += -(-wanted // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return part.view(dtype).view(shape)


def _huge_mapping(wanted_bytes: int) -> torch.Tensor:
    """wanted_bytes of private zeroed memory from a huge page's boundary on; in huge pages where the system has them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    mapping = mmap.mmap(-1, wanted_bytes + HUGE_PAGE_BYTES, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + wanted_bytes]
