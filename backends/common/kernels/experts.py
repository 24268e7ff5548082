"""Rows of experts cut into tiles, on the device: which expert a tile belongs to, and where its weight lies.

    rows      |  expert 0  | 1 |      (2)      3        |            segment_start [E + 1]; expert 2 has no rows
    tiles     [0    ][1    ][2 ][3     ][4     ][5   ]               BLOCK_M rows each, the last of an expert cut short

Every program reads segment_start whole and finds its own tiles; the host knows no more than how many there may be.

Weights of experts lie wherever they were allocated: kernels get the first one's tensors, for their types, and a table
of addresses. Not distances from the first one: where a tensor is small, AMD's compiler keeps what is added to its
pointer in 32 bits, and another expert's weight may lie further away, or before it.
"""

import triton
import triton.language as tl


@triton.jit
def tiles_of_experts(segment_start, E, BLOCK_M: tl.constexpr, E_PAD: tl.constexpr):
    """For each expert: its first row, the row behind its last, and how many tiles end with it. [E_PAD] each."""
    experts = tl.arange(0, E_PAD)
    starts = tl.load(segment_start + experts, mask=experts < E, other=0)
    ends = tl.load(segment_start + 1 + experts, mask=experts < E, other=0)
    return starts, ends, tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, axis=0)


@triton.jit
def expert_of_tile(tile, starts, ends, last_tiles, BLOCK_M: tl.constexpr, E_PAD: tl.constexpr):
    """The tile's expert, its first row, and the row behind the expert's last."""
    experts = tl.arange(0, E_PAD)
    expert = tl.sum((last_tiles <= tile).to(tl.int32), axis=0)
    is_before, is_it = experts < expert, experts == expert
    first_tile = tl.max(tl.where(is_before, last_tiles, 0), axis=0)
    start = tl.sum(tl.where(is_it, starts, 0), axis=0)
    end = tl.sum(tl.where(is_it, ends, 0), axis=0)
    return expert, start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def of_expert(first_weight, addresses, expert):
    """The expert's tensor. Allocations begin at multiples of 16 bytes and more, which the compiler can't see."""
    address = tl.load(addresses + expert).to(tl.pointer_type(first_weight.dtype.element_ty))
    return tl.multiple_of(address, 16)
