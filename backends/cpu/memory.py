"""Zeroed memory for weights, carved one after another from large mappings that end up in huge pages.

    mapping (64 MiB, or one larger weight)
    ┌────────┬─────────┬──────────┬╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
    │ weight │ weight  │  weight  │ never touched, so it takes no memory
    └────────┴─────────┴──────────┴╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌
    ^ 2 MiB boundary

A product with few rows streams every weight from memory once a step. In 4 KiB pages half of the time goes into
translating addresses: huge pages raise a stream from 24 to 32 GB/s on the reference machine. Most weights are smaller
than a huge page, so they share them. A mapping is given back when the last weight in it is.

Finding free huge pages can take the system half a second for a model of 500 MB. So weights are written to ordinary
pages, and `settle` has them moved when all are placed, beside the first step instead of before it (MADV_COLLAPSE, Linux
6.1 and later; older systems are asked for huge pages from the start). KV pools stay in ordinary pages: they come to
life block by block in the middle of steps, where a huge page costs more to hand out than it saves. Only GemmOps uses
this.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading

import torch

HUGE_PAGE_BYTES = 2 << 20
MAPPING_BYTES = 64 << 20
ALIGNMENT_BYTES = 64

MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25


class WeightArena:
    """One engine's weights."""

    def __init__(self) -> None:
        self._mapping = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0
        self._unsettled: list[torch.Tensor] = []
        self._can_collapse = _advise(0, 0, MADV_COLLAPSE)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor, aligned to cache lines; it keeps its mapping alive."""
        wanted = math.prod(shape) * dtype.itemsize
        if self._used_bytes + wanted > self._mapping.numel():
            self._retire()
            self._mapping = self._map(max(wanted, MAPPING_BYTES))
        part = self._mapping[self._used_bytes : self._used_bytes + wanted]
        self._used_bytes += -(-wanted // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return part.view(dtype).view(shape)

    def settle(self) -> threading.Thread:
        """Move what was written so far into huge pages, in the thread returned. Contents and addresses stay."""
        self._retire()
        mover = threading.Thread(target=_collapse, args=(self._unsettled,), name="octavo-settle", daemon=True)
        self._unsettled = []
        mover.start()
        return mover

    def _retire(self) -> None:
        """Carve no more from the present mapping; keep its used part until it is settled."""
        if self._can_collapse and self._used_bytes:
            self._unsettled.append(self._mapping[: self._used_bytes])
        self._mapping = self._mapping[:0]
        self._used_bytes = 0

    def _map(self, num_bytes: int) -> torch.Tensor:
        """Private zeroed memory from a huge page's boundary on."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        whole = torch.frombuffer(mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE_BYTES, flags=flags), dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        mapping = whole[start : start + num_bytes]
        if not self._can_collapse:
            _advise(mapping.data_ptr(), num_bytes, MADV_HUGEPAGE)
        return mapping


def _collapse(written: list[torch.Tensor]) -> None:
    """Collapse what was written, huge page after huge page, and let go of it; what fails stays as it is."""
    while written:
        part = written.pop(0)
        for start in range(0, part.numel(), HUGE_PAGE_BYTES):
            _advise(part.data_ptr() + start, HUGE_PAGE_BYTES, MADV_COLLAPSE)


def _advise(address: int, length_bytes: int, advice: int) -> bool:
    """madvise(2), with the interpreter free meanwhile; False where the system does not know or grant it."""
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), ctypes.c_int(advice)) == 0)
    return False
