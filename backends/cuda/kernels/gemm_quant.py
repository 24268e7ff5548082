"""Products with quantised weights on Hopper.

    gemm_codes    x @ codes        codes widened in registers, from where wgmma takes them: common/kernels/codes.py
    gemm_scaled   codes @ codes    int8 or fp8 on both sides, on the tensor cores as they lie, fed as in kernels/gemm.py

8-bit floats: wgmma keeps some 14 bits of a running sum, so that PROMOTE columns are summed from zero and then added in
fp32: 32 (one wgmma) drop what lies below the largest product alone, 128 cost a quarter of the additions. Neither is a
sum in fp32: the backend declares the class "fp22-128" (chips.py), which holds for both and for no larger PROMOTE.
Integers add up in int32, exactly.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.codes import codes_tile
from octavo.backends.common.kernels.numeric import dot_float8, dot_int8
from octavo.backends.common.kernels.product import finish, tile_at
from octavo.backends.common.kernels.scaled import add_scaled


@triton.jit(do_not_specialize=["M"])
def gemm_codes(
    x, w, scales, offsets, x_scales, out, bias, residual, M, N, K, half, num_groups,
    stride_x, stride_w, stride_scales, stride_x_scales, stride_out, stride_residual,
    FORM: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ value(w).T)."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = tile_at(tile, num_m, num_n, GROUP_M)
        codes_tile(
            x, w, scales, offsets, x_scales, out, bias, residual, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M,
            tile_n * BLOCK_N, N, K, half, num_groups, stride_x, stride_w, stride_scales, stride_x_scales, stride_out,
            stride_residual, FORM, GROUP, X_GROUP, COMPUTE, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def gemm_scaled(
    x, w, x_scales, scales, out, bias, residual, M, N, K,
    stride_x_scales, stride_scales, stride_out, stride_residual,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    PROMOTE: tl.constexpr,
):  # fmt: skip
    """out = epilogue(value(x) @ value(w).T); x and w described, both int8 or both fp8.

    X_GROUP, W_GROUP: columns that share a scale, multiples of BLOCK_K; 0: all.
    """
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, num_m, num_n, GROUP_M)
        rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at, w_at = x_scales + rows.to(tl.int64) * stride_x_scales, scales + cols
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        total = acc.to(tl.int32)
        for first in tl.range(0, K, BLOCK_K):
            x_MK, w_NK = x.load([tile_m * BLOCK_M, first]), w.load([tile_n * BLOCK_N, first])
            left, right = (w_NK, tl.trans(x_MK)) if SWAP else (x_MK, tl.trans(w_NK))
            if X_GROUP > 0 or W_GROUP > 0:
                x_M = tl.load(x_at + (first // X_GROUP if X_GROUP > 0 else 0), mask=rows < M, other=0.0)
                w_N = tl.load(w_at + (first // W_GROUP if W_GROUP > 0 else 0) * stride_scales, mask=cols < N, other=0.0)
                acc = add_scaled(acc, total, left, right, x_M, w_N, PROMOTE, SWAP)
            elif left.dtype == tl.int8:
                total = dot_int8(left, right, total)
            else:
                acc = dot_float8(left, right, acc, PROMOTE)
        acc += total.to(tl.float32)
        acc_MN = tl.trans(acc) if SWAP else acc
        if X_GROUP == 0 and W_GROUP == 0:
            acc_MN *= tl.load(x_at, mask=rows < M, other=0.0)[:, None]
            acc_MN *= tl.load(w_at, mask=cols < N, other=0.0)[None, :]
        finish(
            acc_MN, out, bias, residual, rows, rows < M, tile_n * BLOCK_N, N, stride_out, stride_residual,
            GATE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
