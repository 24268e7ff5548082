"""Codes of a few bits, packed into 32-bit words, spread to one byte each.

    4 bits   word = c0 | c1 << 4 | … | c7 << 28             8 codes; 2 and 8 bits alike
    3 bits   three words = c0 | c1 << 3 | … | c31 << 93     32 codes in one stream of 96 bits (`unpack_stream`),
             word = c0 | c1 << 3 | … | c9 << 27             or 10 in each word, its last 2 bits unused (`unpack_words`)

Words lie in the file as little-endian bytes, as they do in memory on every machine that is supported.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unpack_stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of a stream without gaps: int32 [..., W] -> uint8 [..., W * 32 / bits].

    Args:
        words: the stream; W a multiple of `bits` where bits is 3.
        bits: 2, 3, 4 or 8.
    """
    # Flat first: an axis of length 1 may have any stride, with which elements of another size can't be viewed.
    data = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4)
    if bits == 8:
        return data
    if bits == 3:
        triples = data.unflatten(-1, (-1, 3)).to(torch.int32)
        joined = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
        return torch.stack([joined >> 3 * i & 7 for i in range(8)], -1).flatten(-2).to(torch.uint8)
    return _fields(data, range(0, 8, bits), (1 << bits) - 1)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Codes of which each word holds 32 // bits: int32 [..., W] -> uint8 [..., count].

    Args:
        words: W words, enough for `count` codes; what follows them is padding.
        bits: 1 to 8.
        count: codes wanted.
    """
    if bits in (2, 4, 8):
        return unpack_stream(words, bits)[..., :count]
    mask, per_word = (1 << bits) - 1, 32 // bits
    fields = [(words >> bits * i & mask).to(torch.uint8) for i in range(per_word)]
    return torch.stack(fields, -1).flatten(-2)[..., :count]


def leaves_bits_set(words: torch.Tensor, bits: int) -> bool:
    """Whether words, each of which holds 32 // bits codes, have a bit set in what these leave over."""
    used = 32 // bits * bits
    return used < 32 and bool((words >> used).any())


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes moved down by 2^(bits - 1): uint8 0 .. 2^bits - 1 -> int8, the middle at 0."""
    if bits == 8:
        return (codes ^ 128).view(torch.int8)
    return codes.contiguous().view(torch.int8) - (1 << (bits - 1))


def unpack_nibbles(data: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Two codes of each byte, the low one first: uint8 [..., B] -> uint8 [..., 2 B]."""
    return _fields(data, (4, 0) if high_first else (0, 4), 15)


def _fields(data: torch.Tensor, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """The fields of each byte, one after the other; written in place, which takes a third of stacking them."""
    out = torch.empty(*data.shape, len(shifts), dtype=torch.uint8)
    for at, shift in enumerate(shifts):
        field = torch.bitwise_right_shift(data, shift, out=out[..., at])
        field.bitwise_and_(mask)
    return out.flatten(-2)
