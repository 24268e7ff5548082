"""PagedAttention on Hopper: tiles of queries against tiles of gathered keys, in one walk or in splits.

    program (query tile, KV head)                      q_MD stays, [BLOCK_M, D]: tokens x heads of one KV head
        for each tile of BLOCK_N keys                  block table ─► 64-bit offsets ─► K, V by cp.async, 16 bytes
            s = q · kᵀ    wgmma from 64 rows on, mma below        into num_stages buffers of shared memory
            p, m, l = advance(s)                       exp2
            acc = acc · keep + p · v

    attention_tile    walks all keys of its tile and writes out and lse
    attention_split   walks one split of them and leaves acc, m, l for common/kernels/merge.py

What is Hopper's here: the tile that fills a warp group's product has 64 rows, and loads run ahead of the products as
asynchronous copies, so that the walk needs no register for what is on its way. The walk is cut in two: tiles that every
row sees whole need no masks, and those at the causal edge or at a window's edge do. Keys are multiplied in two chunks
(D_MAIN + D_REST) where that is less than the next power of two: 192 = 128 + 64.

Programs of one tile's heads stand side by side and the last tiles of a request, which see the most keys, come first:
long work starts early, and one second-level cache serves all units, so nothing else asks for an order.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.merge import finish, leave
from octavo.backends.common.kernels.numeric import cast, dot
from octavo.backends.common.kernels.ragged import (
    gather,
    key_range,
    locate,
    query_tile,
    split_range,
    tile_rows,
)
from octavo.backends.common.kernels.softmax import (
    advance,
    biased,
    scaled,
    seen,
)


@triton.jit
def walk(
    acc_MV, m_M, l_M,
    q_MD, q_rest_MD, k, v, table_row, base, rows_M, slope_M,
    begin, end, first, stop, window, factor, cap,
    k_n, k_s, v_n, v_s,
    BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles of keys begin .. end into acc, m and l. MASKED False: every row sees every key of every tile.

    k and v point at the KV head. Keys outside first .. stop are not read: the block of one that left the window may be
    somebody else's, and 0 · NaN is NaN.
    """
    DTYPE: tl.constexpr = q_MD.dtype
    for at in range(begin, end, BLOCK_N):
        keys_N = at + tl.arange(0, BLOCK_N)
        if MASKED:
            is_read_N = (keys_N >= first) & (keys_N < stop)
        else:
            is_read_N = None
        block_N, slot_N = locate(keys_N, is_read_N, table_row, base, BLOCK_SIZE)
        k_at_N = block_N * k_n + slot_N * k_s
        k_ND = gather(k, k_at_N, is_read_N, 0, D_MAIN, D, DTYPE)
        s_MN = dot(q_MD, tl.trans(k_ND), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        if D_REST:
            k_rest_ND = gather(k, k_at_N, is_read_N, D_MAIN, D_REST, D, DTYPE)
            s_MN = dot(q_rest_MD, tl.trans(k_rest_ND), s_MN)
        s_MN = scaled(s_MN, factor, cap)
        if slope_M is not None:
            s_MN = biased(s_MN, slope_M, rows_M, keys_N)
        if MASKED:
            s_MN = tl.where(seen(rows_M, keys_N, first, stop, window, CAUSAL), s_MN, float("-inf"))
        p_MN, keep_M, m_M, l_M = advance(s_MN, m_M, l_M)
        v_NV = gather(v, block_N * v_n + slot_N * v_s, is_read_N, 0, DV_PAD, DV, DTYPE)
        acc_MV = dot(cast(p_MN, DTYPE), v_NV, acc_MV * keep_M[:, None])
    return acc_MV, m_M, l_M


@triton.jit(do_not_specialize=["num_requests", "num_tiles"])
def attention_tile(
    q, k, v, out, lse, query_start_loc, kv_lengths, block_table, sinks, slopes, k_scale, v_scale,
    num_requests, num_tiles, kv_heads,
    q_t, q_h, k_n, k_s, k_h, v_n, v_s, v_h, out_t, out_h, lse_t, table_b, k_scale_h, v_scale_h,
    factor, cap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, IN_FP32: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """All keys of a tile of queries. Grid (num_tiles · kv_heads · chunks): heads side by side, last tiles first."""
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    DTYPE: tl.constexpr = tl.float32 if IN_FP32 else q.dtype.element_ty
    program = tl.program_id(0)
    kv_head = program % (kv_heads * CHUNKS) // CHUNKS
    tile = num_tiles - 1 - program // (kv_heads * CHUNKS)
    request, first_row, rows, position, base, length = query_tile(
        tile, query_start_loc, kv_lengths, num_requests, TOKENS, BLOCK_SIZE > 0
    )
    if rows <= 0:
        return
    token_M, member_M, is_row_M = tile_rows(rows, program % CHUNKS, GROUP, HEADS, BLOCK_M)
    head_M = kv_head * GROUP + member_M
    row_M = (first_row + token_M).to(tl.int64)
    q_at_M = row_M * q_t + head_M * q_h
    q_MD = gather(q, q_at_M, is_row_M, 0, D_MAIN, D, DTYPE)
    q_rest_MD = None
    if D_REST:
        q_rest_MD = gather(q, q_at_M, is_row_M, D_MAIN, D_REST, D, DTYPE)
    slope_M = None
    if slopes is not None:
        slope_M = tl.load(slopes + head_M, mask=is_row_M, other=0.0)
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head * k_scale_h)
    k += kv_head.to(tl.int64) * k_h
    v += kv_head.to(tl.int64) * v_h
    table_row = None
    if BLOCK_SIZE:
        table_row = block_table + request.to(tl.int64) * table_b

    first, stop = key_range(position, rows, length, window, CAUSAL)
    # Tiles from `inner` to `outer` are seen whole by every row.
    begin = first // BLOCK_N * BLOCK_N
    inner = begin
    if window is not None:
        inner = tl.cdiv(tl.maximum(position + rows - window, first), BLOCK_N) * BLOCK_N
    outer = stop
    if CAUSAL:
        outer = tl.minimum(stop, position + 1)
    outer = tl.maximum(outer // BLOCK_N * BLOCK_N, inner)
    acc_MV = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    if window is not None:
        acc_MV, m_M, l_M = walk(
            acc_MV, m_M, l_M, q_MD, q_rest_MD, k, v, table_row, base, position + token_M, slope_M,
            begin, tl.minimum(inner, stop), first, stop, window, factor, cap, k_n, k_s, v_n, v_s,
            BLOCK_SIZE, CAUSAL, True, D, D_MAIN, D_REST, DV, DV_PAD, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc_MV, m_M, l_M = walk(
        acc_MV, m_M, l_M, q_MD, q_rest_MD, k, v, table_row, base, position + token_M, slope_M,
        inner, outer, first, stop, window, factor, cap, k_n, k_s, v_n, v_s,
        BLOCK_SIZE, CAUSAL, False, D, D_MAIN, D_REST, DV, DV_PAD, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    acc_MV, m_M, l_M = walk(
        acc_MV, m_M, l_M, q_MD, q_rest_MD, k, v, table_row, base, position + token_M, slope_M,
        outer, stop, first, stop, window, factor, cap, k_n, k_s, v_n, v_s,
        BLOCK_SIZE, CAUSAL, True, D, D_MAIN, D_REST, DV, DV_PAD, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    log_M = finish(
        acc_MV, m_M, l_M, out, sinks, v_scale, row_M, head_M, kv_head, is_row_M,
        out_t, out_h, v_scale_h, 0, DV_PAD, DV,
    )  # fmt: skip
    if lse is not None:
        tl.store(lse + row_M * lse_t + head_M, log_M, mask=is_row_M)


@triton.jit(do_not_specialize=["num_requests", "first_program", "num_splits"])
def attention_split(
    q, k, v, parts, stats, query_start_loc, kv_lengths, block_table, slopes, k_scale,
    num_requests, first_program, kv_heads, num_splits,
    q_t, q_h, k_n, k_s, k_h, v_n, v_s, v_h, table_b, k_scale_h,
    factor, cap, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CAUSAL: tl.constexpr, IN_FP32: tl.constexpr,
    D: tl.constexpr, D_MAIN: tl.constexpr, D_REST: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of the keys of a tile of queries. Grid (programs, num_splits), from first_program on.

    parts [programs, num_splits, BLOCK_M, DV_PAD] and stats [programs, num_splits, 2, BLOCK_M] (m, l), fp32; a split
    without keys leaves its own as they are, and the merge doesn't look at them.
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    DTYPE: tl.constexpr = tl.float32 if IN_FP32 else q.dtype.element_ty
    program = first_program + tl.program_id(0)
    kv_head = program % (kv_heads * CHUNKS) // CHUNKS
    tile = program // (kv_heads * CHUNKS)
    request, first_row, rows, position, base, length = query_tile(
        tile, query_start_loc, kv_lengths, num_requests, TOKENS, BLOCK_SIZE > 0
    )
    first, stop = key_range(position, rows, length, window, CAUSAL)
    anchor, span = split_range(first, stop, num_splits, SPLIT)
    begin = anchor + tl.program_id(1) * span
    if (rows <= 0) | (begin >= stop):
        return
    token_M, member_M, is_row_M = tile_rows(rows, program % CHUNKS, GROUP, HEADS, BLOCK_M)
    head_M = kv_head * GROUP + member_M
    q_at_M = (first_row + token_M).to(tl.int64) * q_t + head_M * q_h
    q_MD = gather(q, q_at_M, is_row_M, 0, D_MAIN, D, DTYPE)
    q_rest_MD = None
    if D_REST:
        q_rest_MD = gather(q, q_at_M, is_row_M, D_MAIN, D_REST, D, DTYPE)
    slope_M = None
    if slopes is not None:
        slope_M = tl.load(slopes + head_M, mask=is_row_M, other=0.0)
    if k_scale is not None:
        factor *= tl.load(k_scale + kv_head * k_scale_h)
    table_row = None
    if BLOCK_SIZE:
        table_row = block_table + request.to(tl.int64) * table_b
    acc_MV = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MV, m_M, l_M = walk(
        acc_MV, m_M, l_M, q_MD, q_rest_MD, k + kv_head.to(tl.int64) * k_h, v + kv_head.to(tl.int64) * v_h, table_row,
        base, position + token_M, slope_M, tl.maximum(begin, first // BLOCK_N * BLOCK_N),
        tl.minimum(begin + span, stop), first, stop, window, factor, cap, k_n, k_s, v_n, v_s,
        BLOCK_SIZE, CAUSAL, True, D, D_MAIN, D_REST, DV, DV_PAD, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    leave(
        acc_MV, m_M, l_M, parts, stats, tl.program_id(0).to(tl.int64) * num_splits + tl.program_id(1), BLOCK_M, DV_PAD
    )
