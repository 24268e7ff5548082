"""The bytes of a KV pool that belong to no block: between blocks, before the first and after the last.

    storage  | guard | block 0 | pad | block 1 | pad | … | guard |
             ╰─ poison ─╯      ╰──╯ poison            ╰──────╯       all of them compared, byte by byte

Only where the storage is flat bytes of torch and the backend's views lie within the part of it that they were asked
for; a device without torch memory shows its blocks alone. Of a pool too big to fill just the guards and the
surroundings of named blocks are touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from octavo.conformance.harness.buffer import GUARD_BYTES
from octavo.conformance.harness.poison import Poison
from octavo.core.backend import DeviceBackend, KVCache, KVCacheSpec

Span = tuple[int, int, tuple[torch.Tensor, ...]]
"""Bytes of the storage, from and to, and the views of blocks in them, whose bytes are somebody else's matter."""


class Surroundings:
    """A pool's storage with guards, and what lies between its blocks.

    Attributes:
        kv: the view that ops are given.
    """

    def __init__(self, backend: DeviceBackend, spec: KVCacheSpec, num_blocks: int, block_bytes: int) -> None:
        self._backend = backend
        self._dtype = spec.dtype
        self._block_bytes = block_bytes
        self._end = GUARD_BYTES + num_blocks * block_bytes
        self._spans: list[Span] = []
        self._images: list[torch.Tensor] = []
        self._storage, kv = self._guarded(spec, num_blocks)
        self.kv: KVCache = kv or backend.kv_view(backend.allocate_kv_pool(num_blocks, block_bytes), spec)

    def _guarded(self, spec: KVCacheSpec, num_blocks: int) -> tuple[torch.Tensor | None, KVCache | None]:
        """A storage with room for guards and the blocks' view in its middle; neither where the backend has no such."""
        extra = -(-2 * GUARD_BYTES // self._block_bytes)
        pool = self._backend.allocate_kv_pool(num_blocks + extra, self._block_bytes)
        if not _is_flat(pool.storage, pool.num_blocks * self._block_bytes):
            return None, None
        inner = replace(pool, num_blocks=num_blocks, storage=pool.storage[GUARD_BYTES : self._end])
        kv = self._backend.kv_view(inner, spec)
        views = _views(kv)
        within = all(_holds(inner.storage, view) for view in views)
        return (pool.storage, kv) if views and within else (None, None)

    def fill(self, poison: Poison, named: Sequence[int] | None) -> None:
        """Poison everything, or, of a pool too big for that, the guards and the named blocks with what follows them."""
        if self._storage is None:
            return
        self._spans = self._all_spans(named)
        self._images = [self._poisoned(end - start, poison) for start, end, _ in self._spans]
        for (start, end, _), image in zip(self._spans, self._images, strict=True):
            self._storage[start:end].copy_(self._backend.from_host(image.clone()))

    def changed(self) -> list[int]:
        """Bytes outside of all blocks that are no longer as they were, counted from the first block's first byte."""
        if self._storage is None:
            return []
        found = []
        for (start, end, views), image in zip(self._spans, self._images, strict=True):
            after = self._backend.to_host(self._storage[start:end])
            expected = image.clone()
            for view in views:
                self._place_of(view, start, expected).copy_(self._place_of(view, start, after))
            found += [start - GUARD_BYTES + at for at in (after != expected).nonzero().flatten().tolist()]
        return found

    def _all_spans(self, named: Sequence[int] | None) -> list[Span]:
        if self._storage is None:
            return []
        total, views = len(self._storage), _views(self.kv)
        if named is None:
            return [(0, total, views)]
        spans: list[Span] = [(0, GUARD_BYTES, ()), (self._end, total, ())]
        for block in named:
            start = GUARD_BYTES + block * self._block_bytes
            end, parts = start + self._block_bytes, tuple(view[block] for view in views)
            if all(_holds(self._storage[start:end], part) for part in parts):  # Some keep all keys before all values.
                spans.append((start, end, parts))
        return spans

    def _poisoned(self, nbytes: int, poison: Poison) -> torch.Tensor:
        count = -(-nbytes // self._dtype.itemsize)
        return poison.filled((count,), self._dtype).view(torch.uint8)[:nbytes]

    def _place_of(self, view: torch.Tensor, start: int, image: torch.Tensor) -> torch.Tensor:
        """Where a device view's elements are in a host image of the storage's bytes from `start` on."""
        first = (self._offset_bytes(view) - start) // view.dtype.itemsize
        whole = image[: image.numel() // view.dtype.itemsize * view.dtype.itemsize]
        return whole.view(view.dtype).as_strided(view.shape, view.stride(), first)

    def _offset_bytes(self, view: torch.Tensor) -> int:
        storage = 0 if self._storage is None else self._storage.data_ptr()
        return view.data_ptr() - storage


def _holds(storage: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether all of a view's elements lie in these bytes."""
    reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
    first = view.data_ptr() - storage.data_ptr()
    end = first + (reach + 1) * view.dtype.itemsize
    return first >= 0 and end <= len(storage) and first % view.dtype.itemsize == 0


def _is_flat(storage: object, nbytes: int) -> bool:
    """Whether a pool's storage is its bytes, all of them and no more."""
    return isinstance(storage, torch.Tensor) and storage.dtype == torch.uint8 and storage.shape == (nbytes,)


def _views(kv: KVCache) -> tuple[torch.Tensor, ...]:
    """Those with elements: a latent cache has no values."""
    return tuple(view for view in (kv.key_NSKD, kv.value_NSKD) if view is not None and view.numel())
