"""Where a program's queries and keys are: tiles of ragged queries, the keys they see, and keys in pages.

    requests  b           0           1   2                        queries of a request, H / K heads each:
    queries   T     |0 1 2 3 4 5|6|7 8 9|                     row r of a tile = token r / HEADS, head r % HEADS
    tiles of 4      |0      |1    |2|3 |4 |5|                 so that the queries of one KV head fill the product

Request b's tiles are numbered from query_start_loc[b] // TOKENS + b: enough room for all of them whatever the lengths,
found without a prefix sum. A grid of T // TOKENS + B tiles depends on padded shapes alone, so a captured graph may keep
it; tiles without queries leave at once. Tiles of one token (as many heads as rows) need no room: tile t is token t.
Source: the Q blocks of "The Anatomy of a Triton Attention Kernel", 2025; the request is found by one wide load and a
sum here, which costs one trip to memory where a binary search costs log2(B).
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import INTERPRETED, cast

REQUESTS = tl.constexpr(256)
"""Starts read at once: 1 KB. A batch of more takes further turns, whose loads overlap."""


@triton.jit
def find_request(tile, query_start_loc, num_requests, TOKENS: tl.constexpr):
    """The request of a tile of the ragged grid."""
    ROOM: tl.constexpr = 1 if TOKENS > 1 else 0
    request = -1
    for base in range(0, num_requests, REQUESTS):
        b = base + tl.arange(0, REQUESTS)
        start = tl.load(query_start_loc + b, mask=b < num_requests, other=0)
        request += tl.sum(((start // TOKENS + b * ROOM <= tile) & (b < num_requests)).to(tl.int32), 0)
    return request


@triton.jit
def query_tile(tile, query_start_loc, kv_lengths, num_requests, TOKENS: tl.constexpr, PAGED: tl.constexpr):
    """A tile of the ragged grid.

    kv_lengths: [B] lengths when PAGED, else [B + 1] starts of contiguous keys.
    Returns request, first row among T, number of rows (0 or less: leave), position of the first row, base of the
    request's keys among contiguous ones (0 when PAGED), its KV length.
    """
    ROOM: tl.constexpr = 1 if TOKENS > 1 else 0
    request = find_request(tile, query_start_loc, num_requests, TOKENS)
    start = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    first_row = start + (tile - (start // TOKENS + request * ROOM)) * TOKENS
    if PAGED:
        base = 0
        length = tl.load(kv_lengths + request)
    else:
        base = tl.load(kv_lengths + request)
        length = tl.load(kv_lengths + request + 1) - base
    return request, first_row, tl.minimum(TOKENS, end - first_row), length - (end - first_row), base, length


@triton.jit
def tile_rows(num_tokens, chunk, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each of BLOCK_M rows: its token in the tile, its head in the group of one KV head, whether it is one at all.

    A group of more heads than a tile has rows comes in chunks of HEADS.
    """
    r_M = tl.arange(0, BLOCK_M)
    token_M = r_M // HEADS
    member_M = chunk * HEADS + r_M % HEADS
    return token_M, member_M, (token_M < num_tokens) & (member_M < GROUP)


@triton.jit
def key_range(position, rows, length, window, CAUSAL: tl.constexpr):
    """First and one past the last key that any of the rows sees; both ends equal when there is none."""
    stop = length
    if CAUSAL:
        stop = tl.maximum(position + rows, 0)
    first = 0
    if window is not None:
        first = tl.minimum(tl.maximum(position - window + 1, 0), stop)
    return first, stop


@triton.jit
def split_range(first, stop, num_splits, SPLIT: tl.constexpr):
    """Where the first split begins, and the length of each: a multiple of SPLIT, at absolute positions.

    With as many splits as first .. stop has pieces of SPLIT keys, each is one piece, wherever a request's rows begin.
    """
    anchor = first // SPLIT * SPLIT
    return anchor, tl.maximum(tl.cdiv(tl.cdiv(stop - anchor, SPLIT), num_splits), 1) * SPLIT


@triton.jit
def locate(keys_N, is_read_N, table_row, base, BLOCK_SIZE: tl.constexpr):
    """Block and slot of each key, int64: by the request's row of the block table; contiguous keys (BLOCK_SIZE 0) lie in
    slots of "block" base, which its caller strides like slots.

    is_read_N: keys whose table entry may be read; None for all. The others get block 0.
    """
    if BLOCK_SIZE == 0:
        block_N = base.to(tl.int64)
        slot_N = keys_N
    else:
        column_N = keys_N // BLOCK_SIZE
        slot_N = keys_N % BLOCK_SIZE
        if is_read_N is None:
            block_N = tl.load(table_row + column_N).to(tl.int64)
        else:
            block_N = tl.load(table_row + column_N, mask=is_read_N, other=0).to(tl.int64)
    return block_N, slot_N.to(tl.int64)


@triton.jit
def locate_tile(x, at, stop, table_row, x_n, x_s, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the keys at .. at + BLOCK_N of paged x are: a pointer, their offsets from it, and which may be read (those
    before `stop`; `at` is one of them, and a multiple of BLOCK_N).

    A page that holds whole tiles needs one entry of the table, and addresses that differ by constants.
    """
    keys_N = at + tl.arange(0, BLOCK_N)
    is_read_N = keys_N < stop
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table_row + at // BLOCK_SIZE).to(tl.int64)
        x += block * x_n + tl.cast(at % BLOCK_SIZE, tl.int64) * x_s
        at_N = tl.arange(0, BLOCK_N).to(tl.int64) * x_s
    else:
        block_N, slot_N = locate(keys_N, is_read_N, table_row, 0, BLOCK_SIZE)
        at_N = block_N * x_n + slot_N * x_s
    return x, at_N, is_read_N


@triton.jit
def gather(x, offsets_R, is_read_R, FIRST: tl.constexpr, WIDTH: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr):
    """[R, WIDTH] of DTYPE: elements FIRST .. FIRST + WIDTH of the rows at these offsets (int64).

    0 from element LIMIT on, and in rows that are not read (is_read_R None: all are). 8-bit floats fit any DTYPE.
    """
    d_W = FIRST + tl.arange(0, WIDTH)
    at_RW = x + offsets_R[:, None] + d_W[None, :]
    if is_read_R is None:
        if FIRST + WIDTH > LIMIT:
            values_RW = tl.load(at_RW, mask=(d_W < LIMIT)[None, :], other=0.0)
        else:
            values_RW = tl.load(at_RW)
    else:
        if FIRST + WIDTH > LIMIT:
            values_RW = tl.load(at_RW, mask=is_read_R[:, None] & (d_W < LIMIT)[None, :], other=0.0)
        else:
            values_RW = tl.load(at_RW, mask=is_read_R[:, None], other=0.0)
    if INTERPRETED and values_RW.dtype != DTYPE:
        values_RW = cast(values_RW.to(tl.float32), DTYPE)
    else:
        values_RW = values_RW.to(DTYPE)
    return values_RW
