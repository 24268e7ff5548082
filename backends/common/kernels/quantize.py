"""Symmetric quantisation of activations: scale = max|x| / largest code, code = round-to-nearest-even(x / scale).

    segments: groups of a row, or whole rows; segment s of row t is columns s * length .. (the last may be shorter)

    quantize_segments   program = ROWS segments x COLS columns     segments longer than COLS are walked twice
    tensor_maximum      program p of at most PARTS: chunks of CHUNK elements, every so many-th ──► partial[p]
    quantize_tensor     program = CHUNK elements; each takes the maximum of all partials for itself

A maximum does not depend on an order, so neither do codes nor scales. A NaN reaches its segment's scale and all codes
of it; as an integer code NaN is 0. A segment of zeros has scale 1.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast

_ROUNDER = tl.constexpr(1.5 * 2.0**23)
"""Added and taken away again, it rounds an fp32 number below 2^22 to the nearest whole one, ties to even."""


@triton.jit
def _largest(x, axis: tl.constexpr):
    """max|x| along an axis; NaN where there is one."""
    is_nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=True) > 0
    return tl.where(is_nan, float("nan"), tl.max(tl.abs(x), axis=axis, keep_dims=True))


@triton.jit
def _scale(largest, LIMIT: tl.constexpr):
    scale = tl.div_rn(largest, tl.full(largest.shape, LIMIT, tl.float32))
    return tl.where(scale == 0, 1.0, scale)


@triton.jit
def _codes(x, scale, LIMIT: tl.constexpr, dtype: tl.constexpr):
    """x / scale within ±LIMIT, as whole numbers or 8-bit floats."""
    y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    y = tl.clamp(y, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if dtype == tl.int8:
        y = (y + _ROUNDER) - _ROUNDER
        return tl.where(y == y, y, 0.0).to(tl.int8)
    return cast(y, dtype)


@triton.jit
def quantize_segments(
    x, out, scales, num_segments, per_row, length, width, x_stride, out_stride, scale_stride,
    LIMIT: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Codes and scales of segments, counted row by row."""
    segments = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    is_segment = segments < num_segments
    rows = (segments // per_row).to(tl.int64)
    first = (segments % per_row) * length
    end = tl.minimum(first + length, width)
    x_rows = x + rows * x_stride
    out_rows = out + rows * out_stride
    cols = first + tl.arange(0, COLS)[None, :]
    scale_at = scales + rows * scale_stride + segments % per_row
    if IS_WHOLE:
        mask = is_segment & (cols < end)
        values = tl.load(x_rows + cols, mask, other=0.0).to(tl.float32)
        scale = _scale(_largest(values, 1), LIMIT)
        tl.store(scale_at, scale, is_segment)
        tl.store(out_rows + cols, _codes(values, scale, LIMIT, out.dtype.element_ty), mask)
    else:
        largest = tl.zeros((ROWS, 1), tl.float32)
        for start in range(0, length, COLS):
            mask = is_segment & (start + cols < end)
            values = tl.load(x_rows + start + cols, mask, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _largest(values, 1), propagate_nan=tl.PropagateNan.ALL)
        scale = _scale(largest, LIMIT)
        tl.store(scale_at, scale, is_segment)
        for start in range(0, length, COLS):
            mask = is_segment & (start + cols < end)
            values = tl.load(x_rows + start + cols, mask, other=0.0).to(tl.float32)
            tl.store(out_rows + start + cols, _codes(values, scale, LIMIT, out.dtype.element_ty), mask)


@triton.jit
def _chunk(chunk, num_rows, width, stride, CHUNK: tl.constexpr):
    """Offsets of a chunk's elements in a tensor [num_rows, width], and which exist. They are counted row by row."""
    elements = tl.full((CHUNK,), CHUNK, tl.int64) * chunk + tl.arange(0, CHUNK)
    rows = elements // width
    return rows * stride + (elements - rows * width), rows < num_rows


@triton.jit
def tensor_maximum(x, partial, num_rows, width, x_stride, num_chunks, num_parts, CHUNK: tl.constexpr):
    """partial[p] = max|x| over chunks p, p + num_parts, …; of as many programs each writes one."""
    largest = tl.zeros((CHUNK,), tl.float32)
    for chunk in range(tl.program_id(0), num_chunks, num_parts):
        offsets, mask = _chunk(chunk, num_rows, width, x_stride, CHUNK)
        values = tl.load(x + offsets, mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    tl.store(partial + tl.program_id(0) + tl.arange(0, 1), _largest(largest, 0))


@triton.jit
def quantize_tensor(
    x, out, scale_out, partial, num_rows, width, x_stride, out_stride, num_parts,
    LIMIT: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Codes of one chunk under the scale of the whole tensor, which the first program writes."""
    parts = tl.arange(0, PARTS)
    scale = _scale(_largest(tl.load(partial + parts, parts < num_parts, other=0.0), 0), LIMIT)
    chunk = tl.program_id(0)
    tl.store(scale_out + tl.arange(0, 1), scale, (chunk + tl.arange(0, 1)) == 0)
    offsets, mask = _chunk(chunk, num_rows, width, x_stride, CHUNK)
    values = tl.load(x + offsets, mask, other=0.0).to(tl.float32)
    at, _ = _chunk(chunk, num_rows, width, out_stride, CHUNK)
    tl.store(out + at, _codes(values, scale, LIMIT, out.dtype.element_ty), mask)
