"""Kernels on the KV cache: writes of new tokens, with or without their rotary embedding, and moves of whole blocks.

    slot = block * block_size + offset        rows are (token, head) pairs, counted t * heads + h

    write_kv        program = ROWS rows x a whole head            programs of k │ programs of v
    rope_write_kv   the same                       programs of q │ programs of k │ programs of v
    move_blocks     program = one block x TILE of its elements    tiles of keys │ tiles of values    on the second axis
    copy_blocks     program = TILE of every pair's elements       tiles of keys │ tiles of values

    a tile of a block:  rows (slot, head) x COLS, COLS the head up to a power of two; any order of slots and heads in
    memory is a matter of strides alone

Block ids and slots are int64 on their way to an address: a pool passes 2^31 elements. Nothing is written for slot -1.
Moves see words of the element's width and no numbers, so that bytes arrive as they left.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast
from octavo.backends.common.kernels.rows import turn_heads, turned, write_pairs


@triton.jit
def _slot_rows(slots, rows, row_mask, heads, block_size, stride_n, stride_s, stride_h):
    """Where each row is stored, and whether it is: [ROWS, 1] offsets and mask."""
    slot = tl.load(slots + rows // heads, row_mask, other=-1).to(tl.int64)
    block = slot // block_size
    offset = slot - block * block_size
    return block * stride_n + offset * stride_s + (rows % heads).to(tl.int64) * stride_h, slot >= 0


@triton.jit
def _stored(x, rows, heads, scale, scale_stride, HAS_SCALE: tl.constexpr, dtype: tl.constexpr):
    """x (fp32) / scale in the cache's dtype; scale_stride 0: one for the tensor, 1: one for each head."""
    if HAS_SCALE:
        x = tl.div_rn(x, tl.broadcast_to(tl.load(scale + (rows % heads) * scale_stride).to(tl.float32), x.shape))
    return cast(x, dtype)


@triton.jit
def _store_heads(
    x, cache, slots, scale, first_row, num_rows, heads, width, block_size, scale_stride,
    x_stride_t, x_stride_h, stride_n, stride_s, stride_h,
    HAS_SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Rows first_row .. first_row + ROWS of x [T, heads, width] to their slots."""
    rows = (first_row + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    at, is_kept = _slot_rows(slots, rows, row_mask, heads, block_size, stride_n, stride_s, stride_h)
    cols = tl.arange(0, COLS)[None, :]
    mask = is_kept & (cols < width)
    x_rows = x + (rows // heads).to(tl.int64) * x_stride_t + (rows % heads).to(tl.int64) * x_stride_h
    values = tl.load(x_rows + cols, mask, other=0.0).to(tl.float32)
    tl.store(
        cache + at + cols, _stored(values, rows, heads, scale, scale_stride, HAS_SCALE, cache.dtype.element_ty), mask
    )


@triton.jit
def write_kv(
    k, v, key, value, slots, k_scale, v_scale,
    tokens, heads, head_dim, v_head_dim, block_size, scale_stride,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    key_stride_n, key_stride_s, key_stride_h, value_stride_n, value_stride_s, value_stride_h,
    HAS_SCALE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, V_COLS: tl.constexpr,
):  # fmt: skip
    """Rows of k and v to their slots."""
    num_rows = tokens * heads
    program = tl.program_id(0)
    k_programs = tl.cdiv(num_rows, ROWS)
    if program < k_programs:
        _store_heads(
            k, key, slots, k_scale, program * ROWS, num_rows, heads, head_dim, block_size, scale_stride,
            k_stride_t, k_stride_h, key_stride_n, key_stride_s, key_stride_h, HAS_SCALE, ROWS, COLS,
        )  # fmt: skip
    else:
        _store_heads(
            v, value, slots, v_scale, (program - k_programs) * ROWS, num_rows, heads, v_head_dim, block_size,
            scale_stride, v_stride_t, v_stride_h, value_stride_n, value_stride_s, value_stride_h,
            HAS_SCALE, ROWS, V_COLS,
        )  # fmt: skip


@triton.jit
def _turn_and_store_keys(
    k, key, positions, cos_sin, slots, scale, first_row, num_rows, heads, head_dim, rotary_dim, block_size,
    scale_stride, k_stride_t, k_stride_h, stride_n, stride_s, stride_h, table_stride,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rows of k turned, rounded to k's dtype as `rotary` would leave them, and stored at their slots."""
    rows = (first_row + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    at, is_kept = _slot_rows(slots, rows, row_mask, heads, block_size, stride_n, stride_s, stride_h)
    k_rows = k + (rows // heads).to(tl.int64) * k_stride_t + (rows % heads).to(tl.int64) * k_stride_h
    table_rows = tl.load(positions + rows // heads, row_mask, other=0).to(tl.int64) * table_stride
    first, second = turned(k_rows, is_kept, cos_sin, table_rows, rotary_dim, INTERLEAVED, PAIRS)
    first = cast(first, k.dtype.element_ty).to(tl.float32)
    second = cast(second, k.dtype.element_ty).to(tl.float32)
    first = _stored(first, rows, heads, scale, scale_stride, HAS_SCALE, key.dtype.element_ty)
    second = _stored(second, rows, heads, scale, scale_stride, HAS_SCALE, key.dtype.element_ty)
    write_pairs(key + at, is_kept, first, second, rotary_dim, INTERLEAVED, PAIRS)
    if REST:
        cols = rotary_dim + tl.arange(0, REST)[None, :]
        mask = is_kept & (cols < head_dim)
        rest = tl.load(k_rows + cols, mask, other=0.0).to(tl.float32)
        rest = _stored(rest, rows, heads, scale, scale_stride, HAS_SCALE, key.dtype.element_ty)
        tl.store(key + at + cols, rest, mask)


@triton.jit
def rope_write_kv(
    q, k, v, out_q, key, value, positions, cos_sin, slots, k_scale, v_scale,
    q_tokens, tokens, q_heads, heads, head_dim, v_head_dim, rotary_dim, block_size, scale_stride,
    q_stride_t, q_stride_h, out_q_stride_t, out_q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    key_stride_n, key_stride_s, key_stride_h, value_stride_n, value_stride_s, value_stride_h, table_stride,
    INTERLEAVED: tl.constexpr, HAS_SCALE: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, V_COLS: tl.constexpr,
):  # fmt: skip
    """q turned into out_q; k turned, and v as it is, to their slots. `tokens` have slots, `q_tokens` have queries."""
    num_rows = tokens * heads
    program = tl.program_id(0)
    q_programs = tl.cdiv(q_tokens * q_heads, ROWS)
    k_programs = tl.cdiv(num_rows, ROWS)
    if program < q_programs:
        turn_heads(
            q, out_q, positions, cos_sin, program * ROWS, q_tokens * q_heads, q_heads, head_dim, rotary_dim,
            q_stride_t, q_stride_h, out_q_stride_t, out_q_stride_h, table_stride, INTERLEAVED, ROWS, PAIRS, REST,
        )  # fmt: skip
    elif program < q_programs + k_programs:
        _turn_and_store_keys(
            k, key, positions, cos_sin, slots, k_scale, (program - q_programs) * ROWS, num_rows, heads, head_dim,
            rotary_dim, block_size, scale_stride, k_stride_t, k_stride_h, key_stride_n, key_stride_s, key_stride_h,
            table_stride, INTERLEAVED, HAS_SCALE, ROWS, PAIRS, REST,
        )  # fmt: skip
    else:
        _store_heads(
            v, value, slots, v_scale, (program - q_programs - k_programs) * ROWS, num_rows, heads, v_head_dim,
            block_size, scale_stride, v_stride_t, v_stride_h, value_stride_n, value_stride_s, value_stride_h,
            HAS_SCALE, ROWS, V_COLS,
        )  # fmt: skip


@triton.jit
def _in_block(tile, block_size, heads, width, stride_s, stride_h, COLS: tl.constexpr, TILE: tl.constexpr):
    """Offsets of a tile's elements from where their block begins, [TILE] int64, and which of them exist."""
    elements = tl.arange(0, TILE)
    rows = tile * (TILE // COLS) + elements // COLS
    cols = elements % COLS
    offsets = (rows // heads).to(tl.int64) * stride_s + (rows % heads).to(tl.int64) * stride_h + cols
    return offsets, (rows < block_size * heads) & (cols < width)


@triton.jit
def _move_tile(
    cache, buffer, block, index, tile, block_size, heads, width,
    stride_n, stride_s, stride_h, buffer_stride_n, buffer_stride_s, buffer_stride_h,
    TO_BUFFER: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One tile of cache[block] to buffer[index], or back."""
    in_cache, mask = _in_block(tile, block_size, heads, width, stride_s, stride_h, COLS, TILE)
    in_buffer, _ = _in_block(tile, block_size, heads, width, buffer_stride_s, buffer_stride_h, COLS, TILE)
    cache_tile = cache + block * stride_n + in_cache
    buffer_tile = buffer + index.to(tl.int64) * buffer_stride_n + in_buffer
    if TO_BUFFER:
        tl.store(buffer_tile, tl.load(cache_tile, mask), mask)
    else:
        tl.store(cache_tile, tl.load(buffer_tile, mask), mask)


@triton.jit
def move_blocks(
    key, value, key_buffer, value_buffer, ids, block_size, heads, head_dim, v_head_dim,
    key_stride_n, key_stride_s, key_stride_h, value_stride_n, value_stride_s, value_stride_h,
    key_buffer_stride_n, key_buffer_stride_s, key_buffer_stride_h,
    value_buffer_stride_n, value_buffer_stride_s, value_buffer_stride_h,
    TO_BUFFER: tl.constexpr, COLS: tl.constexpr, V_COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Blocks ids[i] of the cache to entry i of the buffers [n, S, K, D], or back."""
    index, tile = tl.program_id(0), tl.program_id(1)
    block = tl.load(ids + index).to(tl.int64)
    key_tiles = tl.cdiv(block_size * heads, TILE // COLS)
    if tile < key_tiles:
        _move_tile(
            key, key_buffer, block, index, tile, block_size, heads, head_dim, key_stride_n, key_stride_s,
            key_stride_h, key_buffer_stride_n, key_buffer_stride_s, key_buffer_stride_h, TO_BUFFER, COLS, TILE,
        )  # fmt: skip
    else:
        _move_tile(
            value, value_buffer, block, index, tile - key_tiles, block_size, heads, v_head_dim, value_stride_n,
            value_stride_s, value_stride_h, value_buffer_stride_n, value_buffer_stride_s, value_buffer_stride_h,
            TO_BUFFER, V_COLS, TILE,
        )  # fmt: skip


@triton.jit
def _meet(sources, destinations, lanes):
    """Whether the order of these pairs matters: one's destination is another's source or destination."""
    destination = destinations[None, :]
    same = (sources[:, None] == destination) | (destinations[:, None] == destination)
    is_other = (lanes[:, None] != lanes[None, :]) & (destination >= 0)
    return tl.max(tl.max((same & is_other).to(tl.int32), axis=1), axis=0) > 0


@triton.jit
def _copy_tile(
    cache, pairs, num_pairs, tile, block_size, heads, width, stride_n, stride_s, stride_h, pair_stride,
    COLS: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One tile of every pair's blocks, PAIRS at once where their order can't be told, else one after the other.

    A tile is read and written by its own program alone, so that an order within the program is an order at all; the
    barriers make what one lane wrote seen by the others.
    """
    offsets, mask = _in_block(tile, block_size, heads, width, stride_s, stride_h, COLS, TILE)
    lanes = tl.arange(0, PAIRS)
    for first in range(0, num_pairs, PAIRS):
        at = pairs + (first + lanes) * pair_stride
        is_pair = first + lanes < num_pairs
        sources = tl.load(at, is_pair, other=-1).to(tl.int64)
        destinations = tl.load(at + 1, is_pair, other=-1).to(tl.int64)
        if _meet(sources, destinations, lanes):
            for i in range(first, min(first + PAIRS, num_pairs)):
                source = tl.load(pairs + i * pair_stride).to(tl.int64)
                destination = tl.load(pairs + i * pair_stride + 1).to(tl.int64)
                words = tl.load(cache + source * stride_n + offsets, mask)
                tl.store(cache + destination * stride_n + offsets, words, mask)
                tl.debug_barrier()
        else:
            both = is_pair[:, None] & mask[None, :]
            words = tl.load(cache + sources[:, None] * stride_n + offsets[None, :], both)
            tl.store(cache + destinations[:, None] * stride_n + offsets[None, :], words, both)
            tl.debug_barrier()


@triton.jit
def copy_blocks(
    key, value, pairs, num_pairs, block_size, heads, head_dim, v_head_dim,
    key_stride_n, key_stride_s, key_stride_h, value_stride_n, value_stride_s, value_stride_h, pair_stride,
    COLS: tl.constexpr, V_COLS: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Whole blocks copied, pair after pair in order."""
    tile = tl.program_id(0)
    key_tiles = tl.cdiv(block_size * heads, TILE // COLS)
    if tile < key_tiles:
        _copy_tile(
            key, pairs, num_pairs, tile, block_size, heads, head_dim, key_stride_n, key_stride_s, key_stride_h,
            pair_stride, COLS, TILE, PAIRS,
        )  # fmt: skip
    else:
        _copy_tile(
            value, pairs, num_pairs, tile - key_tiles, block_size, heads, v_head_dim, value_stride_n, value_stride_s,
            value_stride_h, pair_stride, V_COLS, TILE, PAIRS,
        )  # fmt: skip
