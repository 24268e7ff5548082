"""To the experts and back: (token, choice) pairs sorted by expert, and the weighted sum of what comes back.

    ids [T, K] ──► count    counts [blocks, experts]: how many pairs of each block of PAIRS have which expert
               └─► place    a pair's row = pairs of lower experts + of its own in earlier blocks + before it in its own

         blocks ┌ experts ──────► ┐
              │ │ before this one │   a program adds up all counts, EXPERTS columns at a time: those of earlier blocks
              ▼ │ this one        │   give its base, all of them the segments' starts
                └ after it        ┘

A counting sort: nothing is compared or swapped, no row's place hangs on who comes first, so there are no atomics and
the order is the contract's. No size depends on the ids.

    combine   program = ROWS tokens x COLS columns     choices are added in fp32, one after the other
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast


@triton.jit
def _local_experts(ids, pairs, num_pairs, top_k, first_expert, experts, ids_stride):
    """The expert of each pair, counted from the first that is here; -1 for one that is elsewhere."""
    at = (pairs // top_k).to(tl.int64) * ids_stride + pairs % top_k
    local = tl.load(ids + at, pairs < num_pairs, other=-1).to(tl.int64) - first_expert
    is_here = (pairs < num_pairs) & (local >= 0) & (local < experts)
    return tl.where(is_here, local, -1).to(tl.int32)


@triton.jit
def moe_count(
    ids, counts, num_pairs, top_k, first_expert, experts, ids_stride, counts_stride,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """counts [blocks, experts up to a multiple of EXPERTS], int32."""
    block = tl.program_id(0)
    pairs = block * PAIRS + tl.arange(0, PAIRS)
    local = _local_experts(ids, pairs, num_pairs, top_k, first_expert, experts, ids_stride)
    columns = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    found = (local[:, None] == columns[None, :]).to(tl.int32)
    tl.store(counts + block * counts_stride + columns, tl.sum(found, axis=0))


@triton.jit
def moe_place(
    ids, counts, out_rows, out_places, segment_start,
    num_pairs, top_k, first_expert, experts, num_blocks, ids_stride, places_stride, counts_stride,
    PAIRS: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Places of a block's pairs, their tokens at those places, and zeros in the block's share of the tail."""
    block = tl.program_id(0)
    pairs = block * PAIRS + tl.arange(0, PAIRS)
    local = _local_experts(ids, pairs, num_pairs, top_k, first_expert, experts, ids_stride)
    places = tl.zeros((PAIRS,), tl.int32)
    start = 0
    for first in range(0, experts, EXPERTS):
        columns = first + tl.arange(0, EXPERTS)
        total = tl.zeros((EXPERTS,), tl.int32)
        before = tl.zeros((EXPERTS,), tl.int32)
        for first_block in range(0, num_blocks, BLOCKS):
            blocks = (first_block + tl.arange(0, BLOCKS))[:, None]
            part = tl.load(counts + blocks * counts_stride + columns[None, :], blocks < num_blocks, other=0)
            total += tl.sum(part, axis=0)
            before += tl.sum(tl.where(blocks < block, part, 0), axis=0)
        starts = start + tl.cumsum(total, axis=0) - total
        if block == 0:
            tl.store(segment_start + columns, starts, columns < experts)
        found = (local[:, None] == columns[None, :]).to(tl.int32)
        earlier = tl.cumsum(found, axis=0) - found
        places += tl.sum(found * (earlier + (starts + before)[None, :]), axis=1)
        start += tl.sum(total, axis=0)
    if block == 0:
        tl.store(segment_start + experts, start)
    tokens = pairs // top_k
    is_pair = pairs < num_pairs
    at = tokens.to(tl.int64) * places_stride + pairs % top_k
    tl.store(out_places + at, tl.where(local >= 0, places, -1).to(tl.int64), is_pair)
    tl.store(out_rows + places, tokens.to(tl.int64), is_pair & (local >= 0))
    tl.store(out_rows + pairs, tl.zeros((PAIRS,), tl.int64), is_pair & (pairs >= start))


@triton.jit
def moe_combine(
    y, places, weights, residual, out,
    num_rows, width, top_k, y_stride, places_stride, weights_stride, residual_stride, out_stride,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = residual + the sum over k of weights[:, k] * y[places[:, k]]; `residual` may be `out`."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    row_mask = rows < num_rows
    mask = row_mask & (cols < width)
    total = tl.zeros((ROWS, COLS), tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + rows * residual_stride + cols, mask, other=0.0).to(tl.float32)
    for k in range(top_k):
        place = tl.load(places + rows * places_stride + k, row_mask, other=-1)
        # What is elsewhere is not read: neither its weight nor any row stand for a number.
        weight = tl.load(weights + rows * weights_stride + k, place >= 0, other=0.0).to(tl.float32)
        part = tl.load(y + place.to(tl.int64) * y_stride + cols, mask & (place >= 0), other=0.0).to(tl.float32)
        total += weight * part
    tl.store(out + rows * out_stride + cols, cast(total, out.dtype.element_ty), mask)
