"""Dequantising GGUF blocks: packed bytes in, float32 out, bit for bit what the format defines.

A tensor is a run of blocks. Each decoder takes a chunk of n blocks as uint8 [n, block_bytes] and fills float32
[n, block_elements]. Packed numbers are taken apart in 32-bit words, so that one operation handles eight nibbles, then
widened and scaled in place. Chunks are small enough to stay in the second-level cache: memory is read and written
once. Threads take chunks from one shared queue, so that a core lost to another process costs only its share.

    Q8_0   d f16 | 32 x int8                                     x = d q
    Q4_0   d f16 | 16 bytes of nibbles                           x = d (q - 8)
    Q4_1   d f16 | m f16 | 16 bytes of nibbles                   x = d q + m
    Q5_0   d f16 | 32 high bits | 16 bytes of nibbles            x = d (q - 16)
    Q5_1   d f16 | m f16 | 32 high bits | 16 bytes of nibbles    x = d q + m
    Q4_K   d f16 | dmin f16 | 8 x (scale, min) in 6 bits | 128 bytes of nibbles              x = d sc q - dmin mn
    Q5_K   d f16 | dmin f16 | 8 x (scale, min) in 6 bits | 256 high bits | 128 of nibbles    x = d sc q - dmin mn
    Q6_K   128 bytes of low nibbles | 64 of high bit pairs | 16 x int8 scale | d f16         x = d sc (q - 32)

In the 32-element types the low nibbles are elements 0..15 and the high ones 16..31; in the K types a group of 32
(Q6_K: 64) bytes gives that many elements from its low nibbles, then as many from its high ones.

Source: the GGUF specification and block definitions of the ggml project. Only `gguf.py` talks to this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.load.gguf_types import GGMLType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Decoder = Callable[[Bytes, Floats], None]

CHUNK_ELEMENTS = 1 << 16
# torch converts pieces of this size in the calling thread; from 32,768 elements on it would start threads of its own.
CAST_ELEMENTS = 1 << 14


def dequantize(
    packed: Bytes, kind: GGMLType, out: torch.Tensor, *, executor: Executor | None = None, num_threads: int = 1
) -> None:
    """Dequantise whole blocks.

    Args:
        packed: all blocks, uint8, contiguous.
        kind: a quantised type of `DECODERS`.
        out: contiguous floating-point tensor of as many elements; values are rounded to its dtype.
        executor: runs all but one of the threads.
        num_threads: how many threads share the work.
    """
    blocks_NB = packed.reshape(-1, kind.block_bytes)
    flat = out.view(-1, kind.block_elements)
    chunk_blocks = CHUNK_ELEMENTS // kind.block_elements
    starts = _SharedIterator(range(0, len(blocks_NB), chunk_blocks))
    decode_chunk = _chunk_decoder(DECODERS[kind.name], blocks_NB, flat, chunk_blocks)

    def work() -> None:
        with np.errstate(all="ignore"):  # an infinite or NaN scale gives what IEEE arithmetic gives
            for start in starts:
                decode_chunk(start)

    helpers = min(num_threads, -(-len(blocks_NB) // chunk_blocks)) - 1
    futures = [executor.submit(work) for _ in range(helpers)] if executor is not None else []
    work()
    for future in futures:
        future.result()


def _chunk_decoder(decode: Decoder, blocks_NB: Bytes, out_NE: torch.Tensor, chunk_blocks: int) -> Callable[[int], None]:
    """Return what decodes the chunk that begins at a block, straight into `out_NE` if that is float32."""
    if out_NE.dtype == torch.float32:
        floats_NE: Floats = out_NE.detach().numpy()

        def direct(start: int) -> None:
            end = start + chunk_blocks
            decode(blocks_NB[start:end], floats_NE[start:end])

        return direct

    def cast(start: int) -> None:
        chunk = blocks_NB[start : start + chunk_blocks]
        widened = np.empty((len(chunk), out_NE.shape[1]), np.float32)
        decode(chunk, widened)
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


# ---------------------------------------------------------------- pieces of a block


def _half(blocks: Bytes, at: int) -> Floats:
    """A float16 field of every block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _words(blocks: Bytes, start: int, end: int) -> npt.NDArray[np.uint32]:
    """Bytes start..end of every block as 32-bit words [n, (end - start) / 4]."""
    return np.ascontiguousarray(blocks[:, start:end]).view(np.uint32)


def _nibbles(words: npt.NDArray[np.uint32], group_bytes: int) -> npt.NDArray[np.uint32]:
    """Take nibbles apart: of each group of bytes first the low ones, then the high ones; still four to a word."""
    groups = words.reshape(len(words), -1, group_bytes // 4)
    both = np.empty((len(words), groups.shape[1], 2, group_bytes // 4), np.uint32)
    np.bitwise_and(groups, 0x0F0F0F0F, out=both[:, :, 0])
    np.right_shift(groups, 4, out=both[:, :, 1])
    both[:, :, 1] &= 0x0F0F0F0F
    return both


def _as_bytes(words: npt.NDArray[np.uint32]) -> Bytes:
    return words.reshape(len(words), -1).view(np.uint8)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """The 32 bits at a place, each as the value 16 or 0 of its element: uint8 [n, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _scale_groups(out: Floats, scales: Floats, minimums: Floats | None = None) -> None:
    """out = out * scale - minimum, each [n, groups] covering an equal run of elements."""
    grouped = out.reshape(len(out), scales.shape[1], -1)
    grouped *= scales[:, :, None]
    if minimums is not None:
        grouped -= minimums[:, :, None]


# ---------------------------------------------------------------- one decoder per type


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    q = _as_bytes(_nibbles(_words(blocks, 2, 18), 16))
    out[...] = np.subtract(q, 8, out=q).view(np.int8)
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _as_bytes(_nibbles(_words(blocks, 4, 20), 16))
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    q = _as_bytes(_nibbles(_words(blocks, 6, 22), 16))
    q |= _fifth_bits(blocks, 2)
    out[...] = np.subtract(q, 16, out=q).view(np.int8)
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    q = _as_bytes(_nibbles(_words(blocks, 8, 24), 16))
    q |= _fifth_bits(blocks, 4)
    out[...] = q
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scales, minimums = _k_scales(blocks)
    out[...] = _as_bytes(_nibbles(_words(blocks, 16, 144), 32))
    _scale_groups(out, scales, minimums)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scales, minimums = _k_scales(blocks)
    q = _nibbles(_words(blocks, 48, 176), 32).reshape(len(blocks), 8, 8)
    high = _words(blocks, 16, 48)
    for group in range(8):  # bit `group` of byte i is the fifth bit of element i of that group
        q[:, group] |= ((high >> np.uint32(group)) & np.uint32(0x01010101)) << np.uint32(4)
    out[...] = _as_bytes(q)
    _scale_groups(out, scales, minimums)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    q = _nibbles(_words(blocks, 0, 128), 64).reshape(len(blocks), 2, 4, 8)
    high = _words(blocks, 128, 192).reshape(len(blocks), 2, 8)
    for group in range(4):  # bits 2 group, 2 group + 1 of byte i are the upper two of element i of that group
        q[:, :, group] |= ((high >> np.uint32(2 * group)) & np.uint32(0x03030303)) << np.uint32(4)
    numbers = _as_bytes(q)
    out[...] = np.subtract(numbers, 32, out=numbers).view(np.int8)
    _scale_groups(out, _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32))


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of each of the 8 groups of a Q4_K or Q5_K block, float32 [n, 8].

    The twelve bytes hold, low to high bits: 4 x (6 of scale 0..3, upper 2 of scale 4..7), 4 x the same for the
    minimums, 4 x (lower 4 of scale 4..7, lower 4 of minimum 4..7).
    """
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (last >> 4) | ((second >> 2) & 0x30)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minimums.astype(np.float32)


DECODERS: dict[str, Decoder] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
