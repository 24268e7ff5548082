"""Dequantising GGUF blocks: packed bytes in, float32 out, bit for bit what the format defines.

    packed ──chunks──► blocks.take_apart ──► codes, scales, offsets ──► out = codes * scales - offsets

A tensor is a run of blocks; what is inside one is known to `core/backend/blocks.py` alone, or to the package `gguf` for
the types that only it knows (`PACKAGE_TYPES`; it takes two to ten times as long). Here they are widened and scaled in
place, in chunks that are small enough to stay in the second-level cache: memory is read and written once.
Threads take chunks from one shared queue, so that a core lost to another process costs only its share.

Only `gguf.py` talks to this.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.backend.block_sizes import BLOCK_SIZES
from octavo.core.backend.blocks import take_apart
from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_types import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

CHUNK_ELEMENTS = 1 << 16
# torch converts pieces of this size in the calling thread; from 32,768 elements on it would start threads of its own.
CAST_ELEMENTS = 1 << 14


def dequantize(
    packed: Bytes, kind: GGMLType, out: torch.Tensor, *, executor: Executor | None = None, num_threads: int = 1
) -> None:
    """Dequantise whole blocks.

    Args:
        packed: all blocks, uint8, contiguous.
        kind: a quantised type.
        out: contiguous floating-point tensor of as many elements; values are rounded to its dtype.
        executor: runs all but one of the threads.
        num_threads: how many threads share the work.

    Raises:
        CheckpointError: the type needs the package `gguf`, which is not installed.
    """
    if kind.name not in BLOCK_SIZES:
        _check_package(kind.name)
    blocks_NB = packed.reshape(-1, kind.block_bytes)
    flat = out.view(-1, kind.block_elements)
    chunk_blocks = CHUNK_ELEMENTS // kind.block_elements
    starts = _SharedIterator(range(0, len(blocks_NB), chunk_blocks))
    decode_chunk = _chunk_decoder(kind.name, blocks_NB, flat, chunk_blocks)

    def work() -> None:
        with np.errstate(all="ignore"):  # an infinite or NaN scale gives what IEEE arithmetic gives
            for start in starts:
                decode_chunk(start)

    helpers = min(num_threads, -(-len(blocks_NB) // chunk_blocks)) - 1
    futures = [executor.submit(work) for _ in range(helpers)] if executor is not None else []
    work()
    for future in futures:
        future.result()


def _chunk_decoder(name: str, blocks_NB: Bytes, out_NE: torch.Tensor, chunk_blocks: int) -> Callable[[int], None]:
    """Return what decodes the chunk that begins at a block, straight into `out_NE` if that is float32."""
    if out_NE.dtype == torch.float32:
        floats_NE: Floats = out_NE.detach().numpy()

        def direct(start: int) -> None:
            end = start + chunk_blocks
            _decode(name, blocks_NB[start:end], floats_NE[start:end])

        return direct

    def cast(start: int) -> None:
        chunk = blocks_NB[start : start + chunk_blocks]
        widened = np.empty((len(chunk), out_NE.shape[1]), np.float32)
        _decode(name, chunk, widened)
        into = out_NE[start : start + chunk_blocks].view(-1)
        for source, target in zip(
            torch.from_numpy(widened).view(-1).split(CAST_ELEMENTS), into.split(CAST_ELEMENTS), strict=True
        ):
            target.copy_(source)

    return cast


class _SharedIterator:
    """An iterator that several threads may draw from."""

    def __init__(self, items: range) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._items)


def _decode(name: str, blocks: Bytes, out: Floats) -> None:
    """Fill float32 [n, elements] from blocks [n, block_bytes]."""
    if name not in BLOCK_SIZES:
        import gguf

        out[...] = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
        return
    codes, scales, offsets = take_apart(name, blocks)
    out[...] = codes
    grouped = out.reshape(len(out), scales.shape[1], -1)
    grouped *= scales[:, :, None]
    if offsets is not None:
        grouped -= offsets[:, :, None]


def _check_package(name: str) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(
            f"tensors of type {name} are dequantised by the Python package gguf, which is not installed; install it "
            "(pip install gguf), or take a file in a more common type such as Q4_K_M",
            field=name,
        )
