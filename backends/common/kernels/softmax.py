"""Attention's arithmetic that no hardware changes: a score's way to its weight, the running softmax, its end.

    dot ──scale──► softcap ──► ALiBi ──► mask ──► s (base 2) ──advance──► p, m, l ──total──► out, lse

Scores live in base 2: log2(e) is folded into the scale on the host (`scaled` says how), so that the exponential is one
instruction; only the log-sum-exp that leaves the kernel is natural. Masks select, they never add. Per row:

    m   largest score so far (-inf: nothing seen yet)
    l   sum of 2^(s - m) over the keys seen
    acc sum of 2^(s - m) · v

A tile in which a row sees nothing leaves m, l and acc as they were, bit for bit: the factor is 2^0. That makes a row's
bits depend on where tiles begin and on nothing else. Source: Milakov & Gimelshein 2018; Dao 2023 (FlashAttention-2).
"""

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scaled(dot_MN, factor, cap):
    """Scores in base 2: factor is scale·log2(e) without softcap (cap None); with it scale / c, and cap c·log2(e)."""
    x_MN = dot_MN * factor
    if cap is not None:
        # tanh by one exponential of a number that is never positive: no overflow at any score.
        decay_MN = tl.exp2(tl.abs(x_MN) * (-2.0 * LOG2_E))
        size_MN = cap * ((1.0 - decay_MN) / (1.0 + decay_MN))
        x_MN = tl.where(x_MN < 0, -size_MN, size_MN)
    return x_MN


@triton.jit
def biased(s_MN, slope_M, rows_M, keys_N):
    """s + slope·(key - row) of absolute positions (ALiBi), in base 2."""
    return s_MN + slope_M[:, None] * LOG2_E * (keys_N[None, :] - rows_M[:, None]).to(tl.float32)


@triton.jit
def seen(rows_M, keys_N, first, stop, window, CAUSAL: tl.constexpr):
    """[M, N]: whether a row sees a key. Keys lie in first .. stop - 1; a window (or None) bounds the past."""
    seen_MN = ((keys_N >= first) & (keys_N < stop))[None, :]
    if CAUSAL:
        seen_MN = seen_MN & (keys_N[None, :] <= rows_M[:, None])
    if window is not None:
        seen_MN = seen_MN & (rows_M[:, None] - keys_N[None, :] < window)
    return seen_MN


@triton.jit
def advance(s_MN, m_M, l_M):
    """One tile of scores. Returns weights p [M, N], the factor for what was accumulated [M], and the new m and l."""
    top_M = tl.maximum(m_M, tl.max(s_MN, 1))
    shift_M = tl.where(top_M == float("-inf"), 0.0, top_M)  # -inf - -inf is NaN
    p_MN = tl.exp2(s_MN - shift_M[:, None])
    keep_M = tl.exp2(m_M - shift_M)
    return p_MN, keep_M, top_M, l_M * keep_M + tl.sum(p_MN, 1)


@triton.jit
def total(m_M, l_M, sink_M):
    """Ends a row. Returns what acc is divided by, and the log-sum-exp in natural units.

    sink_M (None, or natural units) joins the denominator of rows that saw a key; a row that saw none gives 1 and -inf.
    """
    is_empty_M = l_M == 0
    log_M = m_M + tl.log2(tl.where(is_empty_M, 1.0, l_M))
    if sink_M is not None:
        sink_M = sink_M * LOG2_E
        top_M = tl.maximum(m_M, sink_M)  # a sink far above every score must not overflow the log-sum-exp
        log_M = top_M + tl.log2(l_M * tl.exp2(m_M - top_M) + tl.exp2(sink_M - top_M))
        l_M = l_M + tl.exp2(sink_M - m_M)
    return tl.where(is_empty_M, 1.0, l_M), tl.where(is_empty_M, float("-inf"), log_M * LN_2)
