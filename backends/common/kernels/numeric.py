"""Casts and products with one meaning, compiled or interpreted.

Triton's interpreter (3.9) drops the low bits where a device rounds to nearest even, doesn't saturate 8-bit floats, and
reads bf16 operands of a product as integers. Each function here has a branch for it, chosen when the kernel is built;
the compiled kernel holds nothing of it. All kernels cast and multiply through this file only.
"""

# Kernels are read by Triton's compiler, not by Python: argument annotations other than tl.constexpr mean nothing to it.
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether kernels run in the interpreter. Fixed when Triton is imported."""


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands are multiplied in full (no TF32)."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_float8(a, b, acc, PROMOTE: tl.constexpr):
    """acc + a @ b of 8-bit floats. A chip that drops bits of a running sum adds it to acc every PROMOTE columns.

    0: it drops none. The interpreter adds up in fp32.
    """
    if INTERPRETED or PROMOTE == 0:
        return dot(a, b, acc)
    COLUMNS: tl.constexpr = a.shape[1]
    return tl.dot(a, b, acc, max_num_imprecise_acc=min(PROMOTE, COLUMNS))


@triton.jit
def dot_int8(a, b, acc):
    """acc + a @ b of int8 in int32: exact. No more than 1024 columns at once, which fp32 holds when interpreted."""
    if INTERPRETED:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32)).to(tl.int32)
    return tl.dot(a, b, acc, out_dtype=tl.int32)


@triton.jit
def snap(x, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """x (fp32, finite, in range) rounded to nearest even to MANTISSA bits behind the point, subnormals included."""
    bits = x.to(tl.int32, bitcast=True)
    drop: tl.constexpr = 23 - MANTISSA
    odd = (bits >> drop) & 1
    rounded = bits + odd + ((1 << (drop - 1)) - 1)
    normal = ((rounded >> drop) << drop).to(tl.float32, bitcast=True)
    # Below the smallest normal number the grid is even: adding 1.5 * 2^(23 + grid's exponent) makes fp32 round to it.
    magic: tl.constexpr = 1.5 * 2.0 ** (23 + MIN_EXPONENT - MANTISSA)
    small = (x + magic) - magic
    return tl.where(tl.abs(x) < 2.0**MIN_EXPONENT, small, normal)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x (fp32) as a float dtype: to nearest even; 8-bit floats saturate; NaN stays NaN."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            y = snap(x, 3, -6)
            return _with_nan(x, tl.where(y == 0, x * 0.0, y).to(dtype), 0x7F)  # what rounds to 0 keeps its sign
    elif dtype == tl.float8e4b8:
        x = tl.clamp(x, -240.0, 240.0, propagate_nan=tl.PropagateNan.ALL)
        if INTERPRETED:
            return _with_nan(x, snap(x, 3, -7).to(dtype), 0x80)
    elif dtype == tl.bfloat16:
        if INTERPRETED:
            return _to_bfloat16(x)
    return x.to(dtype)


@triton.jit
def _with_nan(x, y, CODE: tl.constexpr):
    """y (8-bit floats), CODE where x is NaN."""
    codes = tl.where(x == x, y.to(tl.uint8, bitcast=True), CODE)
    return codes.to(tl.uint8).to(y.dtype, bitcast=True)


@triton.jit
def _to_bfloat16(x):
    """x (fp32) to nearest even, on its bits."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
