"""The end of attention: a row's sums become out and log-sum-exp; splits of a row, or two finished parts, become one.

    attention_split ──► parts, stats   [program, split, …] fp32, in the workspace
                            │ merge_splits: ascending splits, each rescaled to the larger maximum
                            ▼
    attention_tile ──►  acc, m, l ──finish──► out [T, H, Dv] and lse [T, H]

    merge_attention     (out_a, lse_a), (out_b, lse_b) ──► out, lse         over disjoint keys, already normalised

All of it moves memory and multiplies next to nothing: no matrix unit, nothing that one chip does otherwise than
another. Source: Milakov & Gimelshein 2018.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast
from octavo.backends.common.kernels.ragged import key_range, query_tile, split_range, tile_rows
from octavo.backends.common.kernels.softmax import total


@triton.jit
def finish(
    acc_MW, m_M, l_M, out, sinks, v_scale, row_M, head_M, kv_head, is_row_M,
    out_t, out_h, v_scale_h, first_d, WIDTH: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write columns first_d .. first_d + WIDTH of out; returns the rows' log-sum-exp."""
    sink_M = None
    if sinks is not None:
        sink_M = tl.load(sinks + head_M, mask=is_row_M, other=0.0)
    sum_M, log_M = total(m_M, l_M, sink_M)
    acc_MW = acc_MW / sum_M[:, None]
    if v_scale is not None:
        acc_MW *= tl.load(v_scale + kv_head * v_scale_h)
    d_W = first_d + tl.arange(0, WIDTH)
    at_MW = out + (row_M * out_t + head_M * out_h)[:, None] + d_W[None, :]
    tl.store(at_MW, cast(acc_MW, out.dtype.element_ty), mask=is_row_M[:, None] & (d_W < DV)[None, :])
    return log_M


@triton.jit
def leave(acc_MV, m_M, l_M, parts, stats, slot, BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr):
    """Keep a split's sums in the workspace, at its slot (int64)."""
    r_M = tl.arange(0, BLOCK_M)
    d_V = tl.arange(0, DV_PAD)
    tl.store(parts + slot * (BLOCK_M * DV_PAD) + (r_M * DV_PAD)[:, None] + d_V[None, :], acc_MV)
    tl.store(stats + slot * (2 * BLOCK_M) + r_M, m_M)
    tl.store(stats + slot * (2 * BLOCK_M) + BLOCK_M + r_M, l_M)


@triton.jit(do_not_specialize=["num_requests", "first_program", "num_splits"])
def merge_splits(
    parts, stats, out, lse, query_start_loc, kv_lengths, sinks, v_scale,
    num_requests, first_program, kv_heads, num_splits,
    out_t, out_h, lse_t, v_scale_h, window,
    GROUP: tl.constexpr, HEADS: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr,
    DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The splits of a tile of queries into out and lse. Grid (as attention_split's first axis, DV_PAD / WIDTH).

    Splits are added in ascending order, and one that a row saw nothing of changes no bit of it.
    """
    CHUNKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    program = first_program + tl.program_id(0)
    kv_head = program % (kv_heads * CHUNKS) // CHUNKS
    _, first_row, rows, position, _, length = query_tile(
        program // (kv_heads * CHUNKS), query_start_loc, kv_lengths, num_requests, BLOCK_M // HEADS, PAGED
    )
    if rows <= 0:
        return
    first, stop = key_range(position, rows, length, window, CAUSAL)
    anchor, span = split_range(first, stop, num_splits, SPLIT)
    r_M = tl.arange(0, BLOCK_M)
    first_d = tl.program_id(1) * WIDTH
    at_MW = (r_M * DV_PAD)[:, None] + (first_d + tl.arange(0, WIDTH))[None, :]
    acc_MW = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    for split in range(tl.cdiv(stop - anchor, span)):
        slot = tl.program_id(0).to(tl.int64) * num_splits + split
        part_m_M = tl.load(stats + slot * (2 * BLOCK_M) + r_M)
        part_l_M = tl.load(stats + slot * (2 * BLOCK_M) + BLOCK_M + r_M)
        part_MW = tl.load(parts + slot * (BLOCK_M * DV_PAD) + at_MW)
        top_M = tl.maximum(m_M, part_m_M)
        shift_M = tl.where(top_M == float("-inf"), 0.0, top_M)
        keep_M = tl.exp2(m_M - shift_M)
        take_M = tl.exp2(part_m_M - shift_M)
        acc_MW = acc_MW * keep_M[:, None] + part_MW * take_M[:, None]
        l_M = l_M * keep_M + part_l_M * take_M
        m_M = top_M
    token_M, member_M, is_row_M = tile_rows(rows, program % CHUNKS, GROUP, HEADS, BLOCK_M)
    row_M = (first_row + token_M).to(tl.int64)
    head_M = kv_head * GROUP + member_M
    log_M = finish(
        acc_MW, m_M, l_M, out, sinks, v_scale, row_M, head_M, kv_head, is_row_M,
        out_t, out_h, v_scale_h, first_d, WIDTH, DV,
    )  # fmt: skip
    if lse is not None:
        if first_d == 0:
            tl.store(lse + row_M * lse_t + head_M, log_M, mask=is_row_M)


@triton.jit(do_not_specialize=["num_rows"])
def merge_attention(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows, heads,
    a_t, a_h, lse_a_t, b_t, b_h, lse_b_t, out_t, out_h, lse_t,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows are tokens x heads. A part whose log-sum-exp is -inf is dropped by select, whatever it holds.

    out and lse may be inputs: a program reads all of its rows before it writes them.
    """
    r_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R = r_R < num_rows
    token_R = (r_R // heads).to(tl.int64)
    head_R = r_R % heads
    log_a_R = tl.load(lse_a + token_R * lse_a_t + head_R, mask=is_row_R, other=float("-inf"))
    log_b_R = tl.load(lse_b + token_R * lse_b_t + head_R, mask=is_row_R, other=float("-inf"))
    top_R = tl.maximum(log_a_R, log_b_R)
    is_a_R = log_a_R > float("-inf")
    is_b_R = log_b_R > float("-inf")
    shift_R = tl.where(is_a_R | is_b_R, top_R, 0.0)
    weight_a_R = tl.exp(log_a_R - shift_R)
    weight_b_R = tl.exp(log_b_R - shift_R)
    sum_R = tl.where(is_a_R | is_b_R, weight_a_R + weight_b_R, 1.0)
    d_D = tl.arange(0, D_PAD)
    in_D = (d_D < D)[None, :]
    a_RD = tl.load(
        out_a + (token_R * a_t + head_R * a_h)[:, None] + d_D[None, :], mask=is_a_R[:, None] & in_D, other=0.0
    )
    b_RD = tl.load(
        out_b + (token_R * b_t + head_R * b_h)[:, None] + d_D[None, :], mask=is_b_R[:, None] & in_D, other=0.0
    )
    merged_RD = (
        a_RD.to(tl.float32) * (weight_a_R / sum_R)[:, None] + b_RD.to(tl.float32) * (weight_b_R / sum_R)[:, None]
    )
    at_RD = out + (token_R * out_t + head_R * out_h)[:, None] + d_D[None, :]
    tl.store(at_RD, cast(merged_RD, out.dtype.element_ty), mask=is_row_R[:, None] & in_D)
    if lse is not None:
        log_R = tl.where(is_a_R | is_b_R, top_R + tl.log(sum_R), float("-inf"))
        tl.debug_barrier()  # warps load the log-sum-exps for themselves; none may store before all have
        tl.store(lse + token_R * lse_t + head_R, log_R, mask=is_row_R)
