"""Low-rank adapters: out[t] += scale · B (A x[t]), each row with the adapter of its own.

    shrink   program = (ROWS rows of x, adapter, part of K)      h[part, t] = A x[t] over its part of K     fp32
    expand   program = (ROWS rows, COLS columns, adapter)        out[t] += scale · B Σ h[part, t]        parts in order

    a [slots, rank, K], b [slots, N, rank]: adapter i is what stands in slot i, padded with zeros to the slots' rank

A program whose rows have another adapter, or none, reads their numbers and ends. So a row is written by one program,
the one of its adapter, and rows without one by none: no atomics, and no row's bits depend on another row. Where K is
cut, and how many rows a program has, depends on neither the batch nor the ranks.

Slots are found by their distance, never by addresses of their own: a recorded step reads what stands in them when it
is run.

h stays in fp32. bf16 matrix units take it as three bf16 numbers that add up to it, so that the product keeps its 24
bits at three products' cost; rank is small.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast, dot


@triton.jit
def _own_rows(adapters, first, num_rows, adapter, ROWS: tl.constexpr):
    """Rows first .. first + ROWS, and which of them have this adapter."""
    rows = first + tl.arange(0, ROWS)
    own = tl.load(adapters + rows, rows < num_rows, other=-1)
    return rows, own == adapter


@triton.jit
def _slot(slots, adapter, stride_slot, stride, ALIGNED: tl.constexpr):
    """Where an adapter's matrix begins, and the stride of its rows.

    ALIGNED: slots and rows begin at multiples of 8 elements, so that loads may be 16 bytes wide.
    """
    if ALIGNED:
        return slots + tl.multiple_of(adapter.to(tl.int64) * stride_slot, 8), tl.multiple_of(stride, 8)
    else:
        return slots + adapter.to(tl.int64) * stride_slot, stride


@triton.jit
def lora_shrink(
    x, adapters, a_slots, h, num_rows, width, rank, x_stride, a_stride_slot, a_stride_rank, h_stride_part,
    ALIGNED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """h [PARTS, T, RANK] = A x over each part of K, for the rows of one adapter."""
    adapter, part = tl.program_id(1), tl.program_id(2)
    rows, is_own = _own_rows(adapters, tl.program_id(0) * ROWS, num_rows, adapter, ROWS)
    if tl.max(is_own.to(tl.int32), axis=0) > 0:
        a, a_stride = _slot(a_slots, adapter, a_stride_slot, a_stride_rank, ALIGNED)
        ranks = tl.arange(0, RANK)
        lanes = tl.arange(0, DEPTH)
        x_rows = x + rows.to(tl.int64)[:, None] * x_stride
        a_rows = a + ranks.to(tl.int64)[None, :] * a_stride
        h_tile = tl.zeros((ROWS, RANK), tl.float32)
        depth = tl.cdiv(tl.cdiv(width, DEPTH), PARTS) * DEPTH
        for first in range(part * depth, tl.minimum((part + 1) * depth, width), DEPTH):
            cols = first + lanes
            x_tile = tl.load(x_rows + cols[None, :], is_own[:, None] & (cols < width)[None, :], other=0.0)
            a_tile = tl.load(a_rows + cols[:, None], (cols < width)[:, None] & (ranks < rank)[None, :], other=0.0)
            h_tile = dot(x_tile, a_tile, h_tile)
        at = part.to(tl.int64) * h_stride_part + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
        tl.store(h + at, h_tile, is_own[:, None])


@triton.jit
def _times_factor(h_tile, b_tile):
    """h [ROWS, RANK] in fp32 times b [RANK, COLS]."""
    if b_tile.dtype == tl.bfloat16:
        high = cast(h_tile, tl.bfloat16)
        h_tile -= high.to(tl.float32)
        middle = cast(h_tile, tl.bfloat16)
        low = cast(h_tile - middle.to(tl.float32), tl.bfloat16)
        product = tl.zeros((h_tile.shape[0], b_tile.shape[1]), tl.float32)
        return dot(high, b_tile, dot(middle, b_tile, dot(low, b_tile, product)))
    else:
        product = tl.zeros((h_tile.shape[0], b_tile.shape[1]), tl.float32)
        return dot(h_tile, b_tile.to(tl.float32), product)


@triton.jit
def lora_expand(
    h, adapters, b_slots, scales, out, num_rows, width, rank, b_stride_slot, b_stride_col, out_stride, h_stride_part,
    ALIGNED: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """out += scale · B h for the rows of one adapter; out is [T, width]."""
    adapter = tl.program_id(2)
    rows, is_own = _own_rows(adapters, tl.program_id(0) * ROWS, num_rows, adapter, ROWS)
    if tl.max(is_own.to(tl.int32), axis=0) > 0:
        b, b_stride = _slot(b_slots, adapter, b_stride_slot, b_stride_col, ALIGNED)
        ranks = tl.arange(0, RANK)
        if ALIGNED:
            rank = tl.multiple_of(rank, 8)
        h_at = h + rows.to(tl.int64)[:, None] * RANK + ranks[None, :]
        h_tile = tl.zeros((ROWS, RANK), tl.float32)
        for part in range(PARTS):
            h_tile += tl.load(h_at + part * h_stride_part, is_own[:, None], other=0.0)
        cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
        b_mask = (ranks < rank)[:, None] & (cols < width)[None, :]
        b_tile = tl.load(b + cols.to(tl.int64)[None, :] * b_stride + ranks[:, None], b_mask, other=0.0)
        delta = _times_factor(h_tile, b_tile) * tl.load(scales + adapter).to(tl.float32)
        at = out + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
        mask = is_own[:, None] & (cols < width)[None, :]
        total = tl.load(at, mask, other=0.0).to(tl.float32) + delta
        tl.store(at, cast(total, out.dtype.element_ty), mask)
