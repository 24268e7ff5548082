"""Products with quantised weights on CDNA3.

    gemm_codes    x @ codes         codes widened in registers: common/kernels/codes.py
    gemm_scaled   codes @ codes     int8 or fp8 on both sides, on the matrix cores as they lie: common/kernels/scaled.py

The matrix cores add 8-bit floats up in fp32: no sum needs to be cut short.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.codes import codes_tile
from octavo.backends.common.kernels.product import tile_at
from octavo.backends.common.kernels.scaled import scaled_tile
from octavo.backends.rocm.kernels.gemm import tile_of_program


@triton.jit(do_not_specialize=["M"])
def gemm_codes(
    x, w, scales, offsets, x_scales, out, bias, residual, M, N, K, half, num_groups,
    stride_x, stride_w, stride_scales, stride_x_scales, stride_out, stride_residual,
    FORM: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ value(w).T)."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_at(tile_of_program(num_m * num_n, DIES), num_m, num_n, GROUP_M)
    codes_tile(
        x, w, scales, offsets, x_scales, out, bias, residual, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M,
        tile_n * BLOCK_N, N, K, half, num_groups, stride_x, stride_w, stride_scales, stride_x_scales, stride_out,
        stride_residual,
        FORM, GROUP, X_GROUP, COMPUTE, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gemm_scaled(
    x, w, x_scales, scales, out, bias, residual, M, N, K,
    stride_x, stride_w, stride_x_scales, stride_scales, stride_out, stride_residual,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, X_ENCODING: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr,
    DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(value(x) @ value(w).T); both int8 or both fp8.

    X_GROUP, W_GROUP: columns that share a scale, multiples of BLOCK_K; 0: all. X_ENCODING: of bytes that aren't the
    chip's own 8-bit floats.
    """
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_at(tile_of_program(num_m * num_n, DIES), num_m, num_n, GROUP_M)
    scaled_tile(
        x, w, x_scales, scales, out, bias, residual, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M, tile_n * BLOCK_N,
        N, K, stride_x, stride_w, stride_x_scales, stride_scales, stride_out, stride_residual,
        X_GROUP, W_GROUP, X_ENCODING, 0, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
    )  # fmt: skip
