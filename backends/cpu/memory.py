"""Zeroed memory in huge pages: for weights, carved one after another from large mappings, and for KV pools.

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
6.1 and later; older systems are asked for huge pages from the start). A KV pool asks for huge pages at once: it
comes to life block by block, and its blocks lie scattered, so that decode reads 4 KiB here and 4 KiB there: a tenth
faster than in small pages. Only GemmOps and CpuBackend use this.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
import weakref

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
        self._unsettled: list[weakref.ref[torch.Tensor]] = []
        self._can_collapse = _advise(0, 0, MADV_COLLAPSE)

    def zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """A zeroed tensor, aligned to cache lines; it keeps its mapping alive."""
        wanted = math.prod(shape) * dtype.itemsize
        if self._used_bytes + wanted > self._mapping.numel():
            self._mapping = self._weight_mapping(max(wanted, MAPPING_BYTES))
            self._used_bytes = 0
        part = self._mapping[self._used_bytes : self._used_bytes + wanted]
        self._used_bytes += -(-wanted // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return part.view(dtype).view(shape)

    def settle(self) -> None:
        """Move what was written so far into huge pages, in the background. Contents and addresses stay."""
        mappings, self._unsettled = self._unsettled, []
        if mappings:
            threading.Thread(target=_collapse, args=(mappings,), name="octavo-settle", daemon=True).start()

    def _weight_mapping(self, wanted_bytes: int) -> torch.Tensor:
        mapping = _map(wanted_bytes)
        if self._can_collapse:
            self._unsettled.append(weakref.ref(mapping))
        else:
            _advise(mapping.data_ptr(), wanted_bytes, MADV_HUGEPAGE)
        return mapping


def reserve(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes of their own mapping, which the system hands out in huge pages as they are first written.

    Raises:
        OSError: the system refuses so much address space.
    """
    mapping = _map(num_bytes)
    _advise(mapping.data_ptr(), num_bytes, MADV_HUGEPAGE)
    return mapping


def _map(num_bytes: int) -> torch.Tensor:
    """Private zeroed memory from a huge page's boundary on."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    whole = torch.frombuffer(mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags), dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def _collapse(mappings: list[weakref.ref[torch.Tensor]]) -> None:
    """Collapse mapping after mapping; what is gone meanwhile is skipped, what fails stays as it is."""
    for reference in mappings:
        if (mapping := reference()) is not None:
            for start in range(0, mapping.numel(), HUGE_PAGE_BYTES):
                _advise(mapping.data_ptr() + start, HUGE_PAGE_BYTES, MADV_COLLAPSE)


def _advise(address: int, length_bytes: int, advice: int) -> bool:
    """madvise(2), with the interpreter free meanwhile; False where the system does not know or grant it."""
    with contextlib.suppress(AttributeError, OSError):
        madvise = ctypes.CDLL(None).madvise
        return bool(madvise(ctypes.c_void_p(address), ctypes.c_size_t(length_bytes), ctypes.c_int(advice)) == 0)
    return False
