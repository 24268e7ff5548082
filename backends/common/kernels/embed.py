"""Rows of a packed weight by id, widened: the embedding, and what shows a packed weight as a plain one.

ids [T] ──► a program takes BLOCK_T ids and BLOCK_K columns of their rows: code · scale - offset, times `scale`
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.codes import nibble_value
from octavo.backends.common.kernels.numeric import cast


@triton.jit
def embed(
    ids, w, scales, offsets, out, T, N, K, half, stride_w, stride_scales, stride_out, scale,
    FORM: tl.constexpr, GROUP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [T, K] = scale * w[ids]; an id outside [0, N) gives zeros."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    rows = tl.load(ids + tokens, mask=tokens < T, other=-1).to(tl.int64)
    mask = ((rows >= 0) & (rows < N))[:, None] & (cols < K)[None, :]
    if FORM == "int4" or FORM == "uint4" or FORM == "e2m1":
        is_high = cols >= half
        at = tl.where(is_high, cols - half, cols)
        codes = tl.load(w + rows[:, None] * stride_w + at[None, :], mask=mask, other=0).to(tl.uint32)
        low, high = nibble_value(codes, False, FORM), nibble_value(codes, True, FORM)
        values = tl.where(is_high[None, :], high, low)
    else:
        values = tl.load(w + rows[:, None] * stride_w + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if scales is not None:
        group = cols // GROUP if GROUP > 0 else cols * 0
        at = group.to(tl.int64)[None, :] * stride_scales + rows[:, None]
        values = values * tl.load(scales + at, mask=mask, other=0.0)
        if offsets is not None:
            values -= tl.load(offsets + at, mask=mask, other=0.0)
    store = (tokens < T)[:, None] & (cols < K)[None, :]
    out_at = tokens.to(tl.int64)[:, None] * stride_out + cols[None, :]
    tl.store(out + out_at, cast(values * scale, out.dtype.element_ty), mask=store)
