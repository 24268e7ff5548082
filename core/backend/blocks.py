"""GGUF blocks taken apart: packed bytes in; codes, scales and minimums out. The one place that knows their layout.

    blocks [n, block_bytes] ──take_apart──► codes [n, elements], scales [n, groups], offsets [n, groups] or None
                                            element = code * scale - offset, in fp32, in this order

    Q8_0   d f16 | 32 x int8                                     x = d q
    Q4_0   d f16 | 16 bytes of nibbles                           x = d (q - 8)
    Q4_1   d f16 | m f16 | 16 bytes of nibbles                   x = d q + m
    Q5_0   d f16 | 32 high bits | 16 bytes of nibbles            x = d (q - 16)
    Q5_1   d f16 | m f16 | 32 high bits | 16 bytes of nibbles    x = d q + m
    Q4_K   d f16 | dmin f16 | 8 x (scale, min) in 6 bits | 128 bytes of nibbles              x = d sc q - dmin mn
    Q5_K   d f16 | dmin f16 | 8 x (scale, min) in 6 bits | 256 high bits | 128 of nibbles    x = d sc q - dmin mn
    Q6_K   128 bytes of low nibbles | 64 of high bit pairs | 16 x int8 scale | d f16         x = d sc (q - 32)

In the 32-element types the low nibbles are elements 0..15 and the high ones 16..31; in the K types a group of 32
(Q6_K: 64) bytes gives that many elements from its low nibbles, then as many from its high ones. Every product d sc
and dmin mn is exact in fp32, so that one order of operations gives the format's own bits.

Packed numbers are taken apart in 32-bit words, so that one operation handles eight nibbles. The loader widens the
result (load/gguf_quants.py), `QuantizedTensor.affine` hands it to backends that repack it.

Source: the GGUF specification and block definitions of the ggml project.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


class Parts(NamedTuple):
    """n blocks taken apart.

    Attributes:
        codes: int8 or uint8 [n, elements], in the order of the elements; may be a view of the blocks.
        scales: fp32 [n, groups].
        offsets: fp32 [n, groups]; None where the format has none.
    """

    codes: Codes
    scales: Floats
    offsets: Floats | None = None


class UnitScales(NamedTuple):
    """The two levels of a K type's scales: scale = unit * scales, offset = minimum_unit * minimums.

    Attributes:
        units: fp16 [n, 1].
        scales: int8 [n, groups].
        minimum_units, minimums: as those; None where the format has none.
    """

    units: npt.NDArray[np.float16]
    scales: npt.NDArray[np.int8]
    minimum_units: npt.NDArray[np.float16] | None = None
    minimums: npt.NDArray[np.int8] | None = None


def unit_scales(name: str, blocks: Bytes) -> UnitScales | None:
    """The levels of scales of blocks [n, block_bytes]; None for the types that have one level."""
    if name == "Q6_K":
        return UnitScales(blocks[:, 208:210].view(np.float16), blocks[:, 192:208].view(np.int8))
    if name in ("Q4_K", "Q5_K"):
        scales, minimums = (x.view(np.int8) for x in _k_numbers(blocks))
        return UnitScales(blocks[:, 0:2].view(np.float16), scales, blocks[:, 2:4].view(np.float16), minimums)
    return None


def take_apart(name: str, blocks: Bytes) -> Parts:
    """Codes, scales and offsets of blocks [n, block_bytes] of a type of `BLOCK_SIZES`, by its GGUF name.

    An infinite or NaN scale gives what IEEE arithmetic gives; numpy warns of it unless told otherwise.
    """
    return _TYPES[name](blocks)


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


def _less(numbers: Bytes, bias: int) -> npt.NDArray[np.int8]:
    """numbers - bias, in place."""
    return np.subtract(numbers, bias, out=numbers).view(np.int8)


# ---------------------------------------------------------------- one function per type


def _q8_0(blocks: Bytes) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0(blocks: Bytes) -> Parts:
    return Parts(_less(_as_bytes(_nibbles(_words(blocks, 2, 18), 16)), 8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Parts:
    return Parts(_as_bytes(_nibbles(_words(blocks, 4, 20), 16)), _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Bytes) -> Parts:
    q = _as_bytes(_nibbles(_words(blocks, 6, 22), 16))
    q |= _fifth_bits(blocks, 2)
    return Parts(_less(q, 16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Parts:
    q = _as_bytes(_nibbles(_words(blocks, 8, 24), 16))
    q |= _fifth_bits(blocks, 4)
    return Parts(q, _half(blocks, 0), -_half(blocks, 2))


def _q4_k(blocks: Bytes) -> Parts:
    return Parts(_as_bytes(_nibbles(_words(blocks, 16, 144), 32)), *_k_scales(blocks))


def _q5_k(blocks: Bytes) -> Parts:
    q = _nibbles(_words(blocks, 48, 176), 32).reshape(len(blocks), 8, 8)
    high = _words(blocks, 16, 48)
    for group in range(8):  # bit `group` of byte i is the fifth bit of element i of that group
        q[:, group] |= ((high >> np.uint32(group)) & np.uint32(0x01010101)) << np.uint32(4)
    return Parts(_as_bytes(q), *_k_scales(blocks))


def _q6_k(blocks: Bytes) -> Parts:
    q = _nibbles(_words(blocks, 0, 128), 64).reshape(len(blocks), 2, 4, 8)
    high = _words(blocks, 128, 192).reshape(len(blocks), 2, 8)
    for group in range(4):  # bits 2 group, 2 group + 1 of byte i are the upper two of element i of that group
        q[:, :, group] |= ((high >> np.uint32(2 * group)) & np.uint32(0x03030303)) << np.uint32(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return Parts(_less(_as_bytes(q), 32), scales)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of each of the 8 groups of a Q4_K or Q5_K block, float32 [n, 8]."""
    scales, minimums = _k_numbers(blocks)
    return _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minimums.astype(np.float32)


def _k_numbers(blocks: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minimums of a Q4_K or Q5_K block as stored, 0 .. 63, uint8 [n, 8].

    The twelve bytes hold, low to high bits: 4 x (6 of scale 0..3, upper 2 of scale 4..7), 4 x the same for the
    minimums, 4 x (lower 4 of scale 4..7, lower 4 of minimum 4..7).
    """
    first, second, last = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 0x3F, (last & 0x0F) | ((first >> 2) & 0x30)], axis=1)
    minimums = np.concatenate([second & 0x3F, (last >> 4) | ((second >> 2) & 0x30)], axis=1)
    return scales, minimums


_TYPES: dict[str, Callable[[Bytes], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Never written to."""
