"""Weights of codes inside a product: codes to numbers, and the sums over them with activations as they are.

    w [N, row]         x [M, K]                       a form of codes        a byte holds
    ┌───────────┐      ┌───────────┐
    │ codes     │──┐   │           │──┐               code                   one code: int8, fp8, any float
    └───────────┘  │   └───────────┘  │               int4, uint4, e2m1      column j low, column HALF + j high
     scales [G, N] │                  │
     offsets ──────▼                  ▼
         value = code · scale - offset     rounded to COMPUTE
              [BN, BK]  ────── @ ── [BK, BM] ──────► sums [BN, BM] in fp32

The weight is the left operand: it comes from registers, where its codes were widened, and its rows fill the tensor
core's long side, so that a few tokens waste little. Both nibbles of a byte belong to one row and lie HALF columns
apart, so that neither needs to be moved: a tile of bytes is multiplied twice, with two tiles of x. A tile lies in one
group or holds several whole ones: BLOCK_K divides the group, or the group BLOCK_K.
"""

import torch
import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast, dot
from octavo.backends.common.kernels.product import finish, load_tile

COMPUTE_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""What COMPUTE may be, by torch's name for it. Never written to."""


@triton.jit
def nibble_value(byte, HIGH: tl.constexpr, FORM: tl.constexpr):
    """The numbers (fp32) of the low or high nibbles of bytes (uint32).

    e2m1: its exponent and mantissa are put where fp32 has them, below its smallest normal number; 2^126 lifts them out.
    """
    if FORM == "e2m1":
        SHIFT: tl.constexpr = 18 if HIGH else 22
        bits = ((byte << SHIFT) & 0x01C00000) | ((byte << (SHIFT + 6)) & 0x80000000)
        return bits.to(tl.float32, bitcast=True) * 2.0**126
    else:
        LESS: tl.constexpr = 8 if FORM == "int4" else 0
        return ((byte >> 4 if HIGH else byte & 15).to(tl.int32) - LESS).to(tl.float32)


@triton.jit
def scaled(
    values, scales, offsets, cols, col_ok, first, num_groups, stride_scales,
    GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """values [BN, BK] of the columns from `first` on, times their groups' scales, less their offsets."""
    if GROUP == 0 or GROUP >= BLOCK_K:  # one group
        at = (first // GROUP if GROUP > 0 else 0) * stride_scales + cols
        values = values * tl.load(scales + at, mask=col_ok, other=0.0)[:, None]
        if offsets is not None:
            values -= tl.load(offsets + at, mask=col_ok, other=0.0)[:, None]
    else:
        groups = first // GROUP + tl.arange(0, BLOCK_K // GROUP)
        at = groups[None, :] * stride_scales + cols[:, None]
        mask = col_ok[:, None] & (groups < num_groups)[None, :]
        parts = tl.reshape(values, (BLOCK_N, BLOCK_K // GROUP, GROUP))
        parts = parts * tl.load(scales + at, mask=mask, other=0.0)[:, :, None]
        if offsets is not None:
            parts -= tl.load(offsets + at, mask=mask, other=0.0)[:, :, None]
        values = tl.reshape(parts, (BLOCK_N, BLOCK_K))
    return values


@triton.jit
def sum_codes(
    x, w, scales, offsets, x_scales, rows, row_ok, cols, col_ok, K, half, num_groups,
    stride_x, stride_w, stride_scales, stride_x_scales,
    FORM: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums [BLOCK_N, BLOCK_M] of x's rows with the weight's rows `cols`.

    Args:
        half: bytes of a row that hold codes; K where a byte holds one code.
        scales: applied here where GROUP > 0 or there are offsets; else left to the caller.
        x_scales: applied here where X_GROUP > 0, which BLOCK_K divides; else left to the caller.
        GROUP, X_GROUP: columns that share a scale; 0: all.
        EVEN_K: BLOCK_K divides the columns, so that none needs a mask.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for first in tl.range(0, half, BLOCK_K):
        codes = load_tile(w, cols, col_ok, stride_w, first, half, BLOCK_K, not EVEN_K)
        if FORM == "int4" or FORM == "uint4" or FORM == "e2m1":
            codes = codes.to(tl.uint32)
            acc = _step(
                acc, nibble_value(codes, False, FORM), x, scales, offsets, x_scales, rows, row_ok, cols, col_ok,
                first, tl.minimum(K, half), num_groups, stride_x, stride_scales, stride_x_scales,
                GROUP, X_GROUP, COMPUTE, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            acc = _step(
                acc, nibble_value(codes, True, FORM), x, scales, offsets, x_scales, rows, row_ok, cols, col_ok,
                half + first, K, num_groups, stride_x, stride_scales, stride_x_scales,
                GROUP, X_GROUP, COMPUTE, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            acc = _step(
                acc, codes.to(tl.float32), x, scales, offsets, x_scales, rows, row_ok, cols, col_ok,
                first, K, num_groups, stride_x, stride_scales, stride_x_scales,
                GROUP, X_GROUP, COMPUTE, EVEN_K, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    return acc


@triton.jit
def _step(
    acc, values, x, scales, offsets, x_scales, rows, row_ok, cols, col_ok, first, limit, num_groups,
    stride_x, stride_scales, stride_x_scales,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """acc + values @ x[:, first ..].T; x counts as 0 from `limit` on."""
    x_MK = load_tile(x, rows, row_ok, stride_x, first, limit, BLOCK_K, not EVEN_K)
    if GROUP > 0 or offsets is not None:
        values = scaled(
            values, scales, offsets, cols, col_ok, first, num_groups, stride_scales, GROUP, BLOCK_N, BLOCK_K
        )
    if x_MK.dtype != COMPUTE:
        x_MK = cast(x_MK.to(tl.float32), COMPUTE)
    if X_GROUP > 0:
        at = rows.to(tl.int64) * stride_x_scales + first // X_GROUP
        x_M = tl.load(x_scales + at, mask=row_ok & (rows * 0 + first < limit), other=0.0)
        return acc + dot(cast(values, COMPUTE), tl.trans(x_MK), tl.zeros_like(acc)) * x_M[None, :]
    else:
        return dot(cast(values, COMPUTE), tl.trans(x_MK), acc)


@triton.jit
def codes_tile(
    x, w, scales, offsets, x_scales, out, bias, residual, rows, last_row, first_n, N, K, half, num_groups,
    stride_x, stride_w, stride_scales, stride_x_scales, stride_out, stride_residual,
    FORM: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of out, whole: rows `rows` (those below last_row) and BLOCK_N of the weight's rows from first_n on.

    x_scales: of activations that are codes themselves; None where they are as they came.
    """
    cols = first_n + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < last_row, cols < N
    acc_NM = sum_codes(
        x, w, scales, offsets, x_scales, rows, row_ok, cols, col_ok, K, half, num_groups, stride_x, stride_w,
        stride_scales, stride_x_scales, FORM, GROUP, X_GROUP, COMPUTE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    acc = tl.trans(acc_NM)
    if scales is not None and GROUP == 0 and offsets is None:
        acc *= tl.load(scales + cols, mask=col_ok, other=0.0)[None, :]
    if x_scales is not None and X_GROUP == 0:
        acc *= tl.load(x_scales + rows.to(tl.int64) * stride_x_scales, mask=row_ok, other=0.0)[:, None]
    finish(acc, out, bias, residual, rows, row_ok, first_n, N, stride_out, stride_residual, GATE, BLOCK_M, BLOCK_N)
