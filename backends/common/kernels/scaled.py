"""Codes times codes: int8 or 8-bit floats on both sides, with scales of rows or of groups of columns.

    whole rows    sum over K, then x_scale[m] · w_scale[n]
    groups        each BLOCK_K columns lie in one group of x and one of w: their sum is scaled, then added in fp32

Integers are summed in int32, exactly.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import dot_float8, dot_int8
from octavo.backends.common.kernels.product import finish, load_tile


@triton.jit
def native(codes, ENCODING: tl.constexpr):
    """Codes as the chip multiplies them. ENCODING "e4m3fn": bytes for a chip of e4m3fnuz, where they mean half.

    -0 is NaN there.
    """
    if ENCODING == "e4m3fn":
        codes = tl.where(codes == 0x80, 0, codes).to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    return codes


@triton.jit
def add_scaled(acc, total, left, right, x_M, w_N, PROMOTE: tl.constexpr, SWAP: tl.constexpr):
    """acc + (left @ right) · scales; left and right of one group each."""
    if left.dtype == tl.int8:
        part = dot_int8(left, right, tl.zeros_like(total)).to(tl.float32)
    else:
        part = dot_float8(left, right, tl.zeros_like(acc), PROMOTE)
    # One factor after the other: no tile of their products takes registers.
    if SWAP:
        return acc + (part * w_N[:, None]) * x_M[None, :]
    else:
        return acc + (part * x_M[:, None]) * w_N[None, :]


@triton.jit
def scaled_tile(
    x, w, x_scales, scales, out, bias, residual, rows, last_row, first_n, N, K,
    stride_x, stride_w, stride_x_scales, stride_scales, stride_out, stride_residual,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, X_ENCODING: tl.constexpr, PROMOTE: tl.constexpr,
    GATE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One tile of out, whole, read through pointers: as `plain_tile`.

    X_GROUP, W_GROUP: columns that share a scale, multiples of BLOCK_K; 0: all. X_ENCODING: see `native`.
    PROMOTE: columns of 8-bit floats that the chip may sum up by itself; 0: all.
    """
    cols = first_n + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < last_row, cols < N
    x_at, w_at = x_scales + rows.to(tl.int64) * stride_x_scales, scales + cols
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    total = acc.to(tl.int32)
    for first in tl.range(0, K, BLOCK_K):
        x_MK = native(load_tile(x, rows, row_ok, stride_x, first, K, BLOCK_K, not EVEN_K), X_ENCODING)
        w_NK = load_tile(w, cols, col_ok, stride_w, first, K, BLOCK_K, not EVEN_K)
        left, right = (w_NK, tl.trans(x_MK)) if SWAP else (x_MK, tl.trans(w_NK))
        if X_GROUP > 0 or W_GROUP > 0:
            x_M = tl.load(x_at + (first // X_GROUP if X_GROUP > 0 else 0), mask=row_ok, other=0.0)
            w_N = tl.load(w_at + (first // W_GROUP if W_GROUP > 0 else 0) * stride_scales, mask=col_ok, other=0.0)
            acc = add_scaled(acc, total, left, right, x_M, w_N, PROMOTE, SWAP)
        elif left.dtype == tl.int8:
            total = dot_int8(left, right, total)
        else:
            acc = dot_float8(left, right, acc, PROMOTE)
    acc += total.to(tl.float32)
    acc_MN = tl.trans(acc) if SWAP else acc
    if X_GROUP == 0 and W_GROUP == 0:
        acc_MN *= tl.load(x_at, mask=row_ok, other=0.0)[:, None]
        acc_MN *= tl.load(w_at, mask=col_ok, other=0.0)[None, :]
    if X_ENCODING == "e4m3fn":
        acc_MN *= 2.0
    finish(acc_MN, out, bias, residual, rows, row_ok, first_n, N, stride_out, stride_residual, GATE, BLOCK_M, BLOCK_N)
