"""Latent attention on Hopper: a gathered tile of latents is keys and values at once.

    program (query tile, split)                       q_MC, q_MR in shared memory: BLOCK_M rows = tokens x heads
        for each tile of BLOCK_N keys                 block table ─► 64-bit offsets ─► c, k_rope by cp.async, 16 bytes
            s = q · cᵀ + q_rope · k_ropeᵀ             into num_stages buffers of shared memory
            p, m, l = advance(s)
            acc = acc · keep + p · c                  the same buffer, read across (ldmatrix.trans, wgmma's tnspB)

What is Hopper's here: the latents are read from memory once, by copies that need no register, and both products take
them from the one buffer. acc, 512 sums of each row in fp32, decides the rest. 16 rows (a decode step of 12 or 16 heads)
are multiplied by mma: wgmma would multiply 64 for them, for as long as their latents need to arrive. q stays in
shared memory and its fragments are read for every tile; in registers they would be 144 a lane. Tiles of 64 rows are
multiplied by wgmma, each of two warp groups with half of acc's columns.

Splits are merged by common/kernels/merge.py; a launch without splits (parts None) writes out and lse itself.
Source: DeepSeek-AI 2024 (DeepSeek-V2), absorbed form.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.merge import finish, leave
from octavo.backends.common.kernels.numeric import cast, dot
from octavo.backends.common.kernels.ragged import gather, key_range, locate_tile, query_tile, split_range, tile_rows
from octavo.backends.common.kernels.softmax import advance


@triton.jit
def walk(
    acc_MC, m_M, l_M, q_MC, q_MR, latents, table_row, rows_M, begin, stop, factor, c_n, c_s,
    BLOCK_SIZE: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Keys begin .. stop into acc, m and l, in tiles.

    stop is the end of a split, a multiple of BLOCK_N, or of what any row sees, so that one mask does: a key behind its
    row is not seen.
    """
    DTYPE: tl.constexpr = q_MC.dtype
    for at in range(begin, stop, BLOCK_N):
        tile, at_N, is_read_N = locate_tile(latents, at, stop, table_row, c_n, c_s, BLOCK_SIZE, BLOCK_N)
        c_NC = gather(tile, at_N, is_read_N, 0, C_PAD, C, DTYPE)
        k_rope_NR = gather(tile, at_N, is_read_N, C, R_PAD, C + R, DTYPE)
        s_MN = dot(q_MC, tl.trans(c_NC), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
        s_MN = dot(q_MR, tl.trans(k_rope_NR), s_MN) * factor
        keys_N = at + tl.arange(0, BLOCK_N)
        s_MN = tl.where(keys_N[None, :] <= rows_M[:, None], s_MN, float("-inf"))
        p_MN, keep_M, m_M, l_M = advance(s_MN, m_M, l_M)
        acc_MC = dot(cast(p_MN, DTYPE), c_NC, acc_MC * keep_M[:, None])
    return acc_MC, m_M, l_M


@triton.jit(do_not_specialize=["num_requests", "first_tile", "num_splits"])
def mla_attention(
    q_latent, q_rope, latents, out, lse, parts, stats, query_start_loc, seq_lens, block_table,
    num_requests, first_tile, num_splits,
    q_latent_t, q_latent_h, q_rope_t, q_rope_h, c_n, c_s, out_t, out_h, lse_t, table_b, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, IN_FP32: tl.constexpr,
    C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One split of the keys of a tile of queries. Grid (tiles · chunks of HEADS of GROUP heads, num_splits).

    parts [programs, num_splits, BLOCK_M, C_PAD] and stats [programs, num_splits, 2, BLOCK_M] (m, l), fp32; a split
    without keys leaves its own as they are, and the merge doesn't look at them. factor: scale · log2(e).
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = tl.float32 if IN_FP32 else q_latent.dtype.element_ty
    program = tl.program_id(0)
    request, first_row, rows, position, _, length = query_tile(
        first_tile + program // CHUNKS, query_start_loc, seq_lens, num_requests, BLOCK_M // HEADS, True
    )
    first, stop = key_range(position, rows, length, None, True)
    anchor, span = split_range(first, stop, num_splits, SPLIT)
    begin = anchor + tl.program_id(1) * span
    if (rows <= 0) | ((begin >= stop) & (parts is not None)):
        return
    token_M, head_M, is_row_M = tile_rows(rows, program % CHUNKS, GROUP, HEADS, BLOCK_M)
    row_M = (first_row + token_M).to(tl.int64)
    q_MC = gather(q_latent, row_M * q_latent_t + head_M * q_latent_h, is_row_M, 0, C_PAD, C, DTYPE)
    q_MR = gather(q_rope, row_M * q_rope_t + head_M * q_rope_h, is_row_M, 0, R_PAD, R, DTYPE)
    acc_MC = tl.zeros([BLOCK_M, C_PAD], tl.float32)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MC, m_M, l_M = walk(
        acc_MC, m_M, l_M, q_MC, q_MR, latents, block_table + request.to(tl.int64) * table_b, position + token_M,
        begin, tl.minimum(begin + span, stop), factor, c_n, c_s, BLOCK_SIZE, C, C_PAD, R, R_PAD, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if parts is not None:
        slot = program.to(tl.int64) * num_splits + tl.program_id(1)
        leave(acc_MC, m_M, l_M, parts, stats, slot, BLOCK_M, C_PAD)
    else:
        log_M = finish(acc_MC, m_M, l_M, out, None, None, row_M, head_M, 0, is_row_M, out_t, out_h, 0, 0, C_PAD, C)
        if lse is not None:
            tl.store(lse + row_M * lse_t + head_M, log_M, mask=is_row_M)
