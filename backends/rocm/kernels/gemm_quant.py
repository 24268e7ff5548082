"""Products with quantised weights on CDNA3.

    gemm_codes    x @ codes         codes widened in registers: kernels/codes.py
    gemm_scaled   codes @ codes     int8 or fp8 on both sides, on the matrix cores as they lie: as in kernels/gemm.py

The matrix cores add 8-bit floats up in fp32, and integers in int32. Where scales belong to groups, each BLOCK_K columns
lie in one group, and their sum is scaled before it is added.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.codes import codes_tile
from octavo.backends.common.kernels.numeric import dot, dot_int8
from octavo.backends.common.kernels.product import finish, load_tile, tile_at
from octavo.backends.rocm.kernels.gemm import tile_of_program


@triton.jit(do_not_specialize=["M"])
def gemm_codes(
    x, w, scales, offsets, x_scales, out, bias, residual, M, N, K, half,
    stride_x, stride_w, stride_scales, stride_x_scales, stride_out, stride_residual,
    FORM: tl.constexpr, GROUP: tl.constexpr, COMPUTE: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr,
    DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ value(w).T)."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_at(tile_of_program(num_m * num_n, DIES), num_m, num_n, GROUP_M)
    codes_tile(
        x, w, scales, offsets, x_scales, out, bias, residual, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M,
        tile_n * BLOCK_N, N, K, half, stride_x, stride_w, stride_scales, stride_x_scales, stride_out, stride_residual,
        FORM, GROUP, COMPUTE, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def native(codes, ENCODING: tl.constexpr):
    """Codes as the matrix cores take them. ENCODING "e4m3fn": bytes, half of whose value they mean; its -0 is NaN."""
    if ENCODING == "e4m3fn":
        codes = tl.where(codes == 0x80, 0, codes).to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    return codes


@triton.jit(do_not_specialize=["M"])
def gemm_scaled(
    x, w, x_scales, scales, out, bias, residual, M, N, K,
    stride_x, stride_w, stride_x_scales, stride_scales, stride_out, stride_residual,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, X_ENCODING: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr,
    DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(value(x) @ value(w).T); both int8 or both fp8.

    X_GROUP, W_GROUP: columns that share a scale, multiples of BLOCK_K; 0: all. X_ENCODING: see `native`.
    """
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_at(tile_of_program(num_m * num_n, DIES), num_m, num_n, GROUP_M)
    rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    x_at, w_at = x_scales + rows.to(tl.int64) * stride_x_scales, scales + cols
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    total = acc.to(tl.int32)
    for first in tl.range(0, K, BLOCK_K):
        x_MK = native(load_tile(x, rows, rows < M, stride_x, first, K, BLOCK_K, not EVEN_K), X_ENCODING)
        w_NK = load_tile(w, cols, cols < N, stride_w, first, K, BLOCK_K, not EVEN_K)
        left, right = (w_NK, tl.trans(x_MK)) if SWAP else (x_MK, tl.trans(w_NK))
        if X_GROUP == 0 and W_GROUP == 0:
            if left.dtype == tl.int8:
                total = dot_int8(left, right, total)
            else:
                acc = dot(left, right, acc)
        else:
            x_M = tl.load(x_at + (first // X_GROUP if X_GROUP > 0 else 0), mask=rows < M, other=0.0)
            w_N = tl.load(w_at + (first // W_GROUP if W_GROUP > 0 else 0) * stride_scales, mask=cols < N, other=0.0)
            if left.dtype == tl.int8:
                part = dot_int8(left, right, tl.zeros_like(total)).to(tl.float32)
            else:
                part = dot(left, right, tl.zeros_like(acc))
            acc += part * (w_N[:, None] * x_M[None, :] if SWAP else x_M[:, None] * w_N[None, :])
    acc_MN = tl.trans(acc + total.to(tl.float32)) if SWAP else acc + total.to(tl.float32)
    if X_GROUP == 0 and W_GROUP == 0:
        acc_MN *= tl.load(x_at, mask=rows < M, other=0.0)[:, None]
        acc_MN *= tl.load(w_at, mask=cols < N, other=0.0)[None, :]
    if X_ENCODING == "e4m3fn":
        acc_MN *= 2.0
    finish(
        acc_MN, out, bias, residual, rows, rows < M, tile_n * BLOCK_N, N, stride_out, stride_residual,
        GATE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
