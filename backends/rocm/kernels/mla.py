"""Latent attention on CDNA3: a gathered tile of latents is keys and values at once.

    program (query tile, split)                       q in registers, as fragments: BLOCK_M rows = tokens x heads
        for each tile of BLOCK_N keys                 block table ─► 64-bit offsets ─► c, k_rope, global_load_dwordx4
            s = c · qᵀ + k_rope · q_ropeᵀ   [N, M]    registers ─► LDS, 32 KB for 32 latents of 512 in 16 bits
            p, m, l = advance(sᵀ)
            acc = acc · keep + cᵀ · p       [C, M]    turned within the lanes' registers on its way into the same LDS

What is CDNA3's here: of 64 KB of LDS a tile takes half, so that two programs share a unit and one multiplies while the
other loads; nothing is staged ahead. TURN: few rows. Waves are dealt along the first side of a product, and 16 rows
would have all of them do the same work; 32 keys and 512 elements of a latent have work for each. Many rows stand on the
first side themselves: turned, each wave would hold fragments of all of q.

Eight dies have a second-level cache of 4 MB each: programs that read the same latents, chunks of a tile's heads and
tiles of one request, are renumbered so that one die takes them.

Splits are merged by common/kernels/merge.py; a launch without splits (parts None) writes out and lse itself.
Source: DeepSeek-AI 2024 (DeepSeek-V2), absorbed form.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.merge import finish, leave
from octavo.backends.common.kernels.numeric import cast, dot
from octavo.backends.common.kernels.ragged import gather, key_range, locate_tile, query_tile, split_range, tile_rows
from octavo.backends.common.kernels.softmax import advance
from octavo.backends.rocm.kernels.gemm import tile_of_program


@triton.jit
def turned(x, TURN: tl.constexpr):
    """x, across where TURN."""
    return tl.trans(x) if TURN else x


@triton.jit
def walk(
    acc, m_M, l_M, q_latent, q_rope, latents, table_row, rows_M, begin, stop, factor, c_n, c_s,
    BLOCK_SIZE: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Keys begin .. stop into acc, m and l, in tiles. TURN: acc is [C, M], q_latent [C, M] and q_rope [R, M].

    stop is the end of a split, a multiple of BLOCK_N, or of what any row sees, so that one mask does: a key behind its
    row is not seen.
    """
    DTYPE: tl.constexpr = q_latent.dtype
    for at in range(begin, stop, BLOCK_N):
        tile, at_N, is_read_N = locate_tile(latents, at, stop, table_row, c_n, c_s, BLOCK_SIZE, BLOCK_N)
        c_NC = gather(tile, at_N, is_read_N, 0, C_PAD, C, DTYPE)
        k_rope_NR = gather(tile, at_N, is_read_N, C, R_PAD, C + R, DTYPE)
        if TURN:
            s_NM = dot(c_NC, q_latent, tl.zeros([BLOCK_N, BLOCK_M], tl.float32))
            s_MN = tl.trans(dot(k_rope_NR, q_rope, s_NM)) * factor
        else:
            s_MN = dot(q_latent, tl.trans(c_NC), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            s_MN = dot(q_rope, tl.trans(k_rope_NR), s_MN) * factor
        keys_N = at + tl.arange(0, BLOCK_N)
        s_MN = tl.where(keys_N[None, :] <= rows_M[:, None], s_MN, float("-inf"))
        p_MN, keep_M, m_M, l_M = advance(s_MN, m_M, l_M)
        if TURN:
            acc = dot(tl.trans(c_NC), cast(tl.trans(p_MN), DTYPE), acc * keep_M[None, :])
        else:
            acc = dot(cast(p_MN, DTYPE), c_NC, acc * keep_M[:, None])
    return acc, m_M, l_M


@triton.jit(do_not_specialize=["num_requests", "first_tile", "num_splits"])
def mla_attention(
    q_latent, q_rope, latents, out, lse, parts, stats, query_start_loc, seq_lens, block_table,
    num_requests, first_tile, num_splits,
    q_latent_t, q_latent_h, q_rope_t, q_rope_h, c_n, c_s, out_t, out_h, lse_t, table_b, factor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, IN_FP32: tl.constexpr,
    C: tl.constexpr, C_PAD: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    TURN: tl.constexpr, DIES: tl.constexpr,
):  # fmt: skip
    """One split of the keys of a tile of queries. Grid (tiles · chunks of HEADS of GROUP heads, num_splits).

    parts [programs, num_splits, BLOCK_M, C_PAD] and stats [programs, num_splits, 2, BLOCK_M] (m, l), fp32; a split
    without keys leaves its own as they are, and the merge doesn't look at them. factor: scale · log2(e).
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = tl.float32 if IN_FP32 else q_latent.dtype.element_ty
    program = tile_of_program(tl.num_programs(0), DIES)
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
    acc = tl.zeros([C_PAD, BLOCK_M] if TURN else [BLOCK_M, C_PAD], tl.float32)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc, m_M, l_M = walk(
        acc, m_M, l_M, turned(q_MC, TURN), turned(q_MR, TURN), latents, block_table + request.to(tl.int64) * table_b,
        position + token_M, begin, tl.minimum(begin + span, stop), factor, c_n, c_s,
        BLOCK_SIZE, C, C_PAD, R, R_PAD, BLOCK_M, BLOCK_N, TURN,
    )  # fmt: skip
    acc_MC = turned(acc, TURN)
    if parts is not None:
        slot = program.to(tl.int64) * num_splits + tl.program_id(1)
        leave(acc_MC, m_M, l_M, parts, stats, slot, BLOCK_M, C_PAD)
    else:
        log_M = finish(acc_MC, m_M, l_M, out, None, None, row_M, head_M, 0, is_row_M, out_t, out_h, 0, 0, C_PAD, C)
        if lse is not None:
            tl.store(lse + row_M * lse_t + head_M, log_M, mask=is_row_M)
