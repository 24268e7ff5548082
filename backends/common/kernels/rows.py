"""Kernels on rows: RMSNorm and LayerNorm, rotary embedding, activations.

    rms_norm, layer_norm   program = ROWS rows x all columns, COLS at a time     rows of [T, H] are counted t * H + h
    act_mul, activate      program = ROWS rows x COLS columns                    the grid's second axis walks columns
    rotary                 program = ROWS (token, head) rows x one whole head    programs of q first, then those of k

         ┌────── COLS ──────┐
    ROWS │ x  x  x  x  x  x │ x  x  x …   norms: a row that fits COLS is read once and stays in registers (IS_WHOLE);
         │ x  x  x  x  x  x │ x  x  x …   a longer one is read anew for each sum, and to be written: numbers are added
                                          lane by lane, then across lanes

A row's sums are added in an order that its width alone fixes (tiles are chosen by width), so its bits are the same in
any batch. An output may be its input: every element is read by the program that writes it, before it does.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast


@triton.jit
def _row_offsets(rows, heads, stride_t, stride_h):
    """Where rows t * heads + h begin."""
    return (rows // heads).to(tl.int64) * stride_t + (rows % heads).to(tl.int64) * stride_h


@triton.jit
def _summed(x_rows, residual_rows, cols, mask, HAS_RESIDUAL: tl.constexpr):
    """x in fp32; with a residual the sum of both, rounded to the residual's dtype."""
    x = tl.load(x_rows + cols, mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_rows + cols, mask, other=0.0).to(tl.float32)
        x = cast(residual + x, residual_rows.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def _write_norm(x, scale, weight, out_rows, residual_rows, cols, mask, col_mask, HAS_RESIDUAL: tl.constexpr):
    """x * scale * weight to out; x itself, which is rounded already, to the residual."""
    if HAS_RESIDUAL:
        tl.store(residual_rows + cols, cast(x, residual_rows.dtype.element_ty), mask)
    weights = tl.load(weight + cols, col_mask, other=0.0).to(tl.float32)
    tl.store(out_rows + cols, cast(x * scale * weights, out_rows.dtype.element_ty), mask)


@triton.jit
def rms_norm(
    x, residual, weight, out,
    num_rows, heads, width, eps,
    x_stride_t, x_stride_h, residual_stride_t, residual_stride_h, out_stride_t, out_stride_h,
    HAS_RESIDUAL: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = x / sqrt(mean(x²) + eps) * weight; with a residual, residual += x first and its norm."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    x_rows = x + _row_offsets(rows, heads, x_stride_t, x_stride_h)
    residual_rows = residual + _row_offsets(rows, heads, residual_stride_t, residual_stride_h)
    out_rows = out + _row_offsets(rows, heads, out_stride_t, out_stride_h)
    cols = tl.arange(0, COLS)[None, :]
    if IS_WHOLE:
        mask = row_mask & (cols < width)
        values = _summed(x_rows, residual_rows, cols, mask, HAS_RESIDUAL)
        mean = tl.sum(values * values, axis=1, keep_dims=True) / width
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        _write_norm(values, scale, weight, out_rows, residual_rows, cols, mask, cols < width, HAS_RESIDUAL)
    else:
        squares = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, width, COLS):
            at = first + cols
            values = _summed(x_rows, residual_rows, at, row_mask & (at < width), HAS_RESIDUAL)
            squares += values * values
        mean = tl.sum(squares, axis=1, keep_dims=True) / width
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        # The sum is made anew, not read back: the residual's old value is needed until here.
        for first in range(0, width, COLS):
            at = first + cols
            mask = row_mask & (at < width)
            values = _summed(x_rows, residual_rows, at, mask, HAS_RESIDUAL)
            _write_norm(values, scale, weight, out_rows, residual_rows, at, mask, at < width, HAS_RESIDUAL)


@triton.jit
def _centred(values, mean, mask):
    """What lies beyond a row's end is no part of its variance."""
    return tl.where(mask, values - mean, 0.0)


@triton.jit
def _write_layer_norm(
    x, mean, scale, weight, bias, out_rows, residual_rows, cols, mask, col_mask,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """(x - mean) * scale * weight + bias to out; x itself, which is rounded already, to the residual."""
    if HAS_RESIDUAL:
        tl.store(residual_rows + cols, cast(x, residual_rows.dtype.element_ty), mask)
    y = (x - mean) * scale * tl.load(weight + cols, col_mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + cols, col_mask, other=0.0).to(tl.float32)
    tl.store(out_rows + cols, cast(y, out_rows.dtype.element_ty), mask)


@triton.jit
def layer_norm(
    x, residual, weight, bias, out,
    num_rows, heads, width, eps,
    x_stride_t, x_stride_h, residual_stride_t, residual_stride_h, out_stride_t, out_stride_h,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_WHOLE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out = (x - mean) / sqrt(mean((x - mean)²) + eps) * weight + bias; with a residual, residual += x first.

    The mean is taken off before anything is squared: of rows that lie far from 0 the difference of two means of squares
    would leave nothing.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    x_rows = x + _row_offsets(rows, heads, x_stride_t, x_stride_h)
    residual_rows = residual + _row_offsets(rows, heads, residual_stride_t, residual_stride_h)
    out_rows = out + _row_offsets(rows, heads, out_stride_t, out_stride_h)
    cols = tl.arange(0, COLS)[None, :]
    if IS_WHOLE:
        mask = row_mask & (cols < width)
        values = _summed(x_rows, residual_rows, cols, mask, HAS_RESIDUAL)
        mean = tl.sum(values, axis=1, keep_dims=True) / width
        centred = _centred(values, mean, mask)
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, axis=1, keep_dims=True) / width + eps))
        _write_layer_norm(
            values, mean, scale, weight, bias, out_rows, residual_rows, cols, mask, cols < width, HAS_BIAS, HAS_RESIDUAL
        )
    else:
        sums = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, width, COLS):
            mask = row_mask & (first + cols < width)
            sums += _summed(x_rows, residual_rows, first + cols, mask, HAS_RESIDUAL)
        mean = tl.sum(sums, axis=1, keep_dims=True) / width
        sums = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, width, COLS):
            mask = row_mask & (first + cols < width)
            centred = _centred(_summed(x_rows, residual_rows, first + cols, mask, HAS_RESIDUAL), mean, mask)
            sums += centred * centred
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(sums, axis=1, keep_dims=True) / width + eps))
        for first in range(0, width, COLS):
            at = first + cols
            mask = row_mask & (at < width)
            values = _summed(x_rows, residual_rows, at, mask, HAS_RESIDUAL)
            _write_layer_norm(
                values, mean, scale, weight, bias, out_rows, residual_rows, at, mask, at < width, HAS_BIAS, HAS_RESIDUAL
            )


@triton.jit
def activation(x, KIND: tl.constexpr):
    """silu, relu, or gelu exactly or by tanh; x in fp32.

    ½x(1 + tanh y) = x / (1 + e^-2y): where e^-2y overflows the quotient is 0, as it should be.
    """
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    else:
        tl.static_assert(KIND == "gelu", "an activation that no kernel has")
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gated(gate, up, GATE: tl.constexpr):
    """A pair made one, as the contract's Gate says; fp32."""
    if GATE == "swiglu_clamped":
        gate = tl.minimum(gate, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -7.0, 7.0, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * (gate / (1.0 + tl.exp(-1.702 * gate)))
    else:
        return activation(gate, GATE) * up


@triton.jit
def act_mul(x, out, num_rows, width, x_stride, out_stride, GATE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [T, width] = the pair of x[:, :width] and x[:, width:] made one."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    mask = (rows < num_rows) & (cols < width)
    x_rows = x + rows.to(tl.int64) * x_stride
    gate = tl.load(x_rows + cols, mask, other=0.0).to(tl.float32)
    up = tl.load(x_rows + width + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + rows.to(tl.int64) * out_stride + cols, cast(gated(gate, up, GATE), out.dtype.element_ty), mask)


@triton.jit
def activate(x, out, num_rows, width, x_stride, out_stride, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """out [T, width] = act(x)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    mask = (rows < num_rows) & (cols < width)
    values = tl.load(x + rows.to(tl.int64) * x_stride + cols, mask, other=0.0).to(tl.float32)
    tl.store(out + rows.to(tl.int64) * out_stride + cols, cast(activation(values, KIND), out.dtype.element_ty), mask)


@triton.jit
def turned(rows, row_mask, cos_sin, table_rows, rotary_dim, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """Both elements of each rotary pair after the turn, fp32 [ROWS, PAIRS].

    rows: pointers to rows of heads, [ROWS, 1]. table_rows: where each row's cosines begin in cos_sin, [ROWS, 1].
    """
    half = rotary_dim // 2
    pairs = tl.arange(0, PAIRS)[None, :]
    mask = row_mask & (pairs < half)
    cos = tl.load(cos_sin + table_rows + pairs, mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin + table_rows + half + pairs, mask, other=0.0).to(tl.float32)
    if INTERLEAVED:
        # One wide load of neighbours that are parted in registers, in place of two loads of every other element.
        cols = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.load(rows + cols, row_mask & (cols < rotary_dim), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], PAIRS, 2)))
    else:
        first = tl.load(rows + pairs, mask, other=0.0).to(tl.float32)
        second = tl.load(rows + half + pairs, mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def write_pairs(rows, row_mask, first, second, rotary_dim, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """Pairs [ROWS, PAIRS], of the rows' dtype, to the first rotary_dim elements of each row."""
    half = rotary_dim // 2
    if INTERLEAVED:
        cols = tl.arange(0, 2 * PAIRS)[None, :]
        both = tl.reshape(tl.join(first, second), (rows.shape[0], 2 * PAIRS))
        tl.store(rows + cols, both, row_mask & (cols < rotary_dim))
    else:
        pairs = tl.arange(0, PAIRS)[None, :]
        mask = row_mask & (pairs < half)
        tl.store(rows + pairs, first, mask)
        tl.store(rows + half + pairs, second, mask)


@triton.jit
def turn_heads(
    x, out, positions, cos_sin, first_row, num_rows, heads, head_dim, rotary_dim,
    x_stride_t, x_stride_h, out_stride_t, out_stride_h, table_stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rows first_row .. first_row + ROWS of [T, H] heads turned from x into out; the rest of each head is copied."""
    rows = (first_row + tl.arange(0, ROWS))[:, None]
    row_mask = rows < num_rows
    x_rows = x + _row_offsets(rows, heads, x_stride_t, x_stride_h)
    out_rows = out + _row_offsets(rows, heads, out_stride_t, out_stride_h)
    table_rows = tl.load(positions + rows // heads, row_mask, other=0).to(tl.int64) * table_stride
    first, second = turned(x_rows, row_mask, cos_sin, table_rows, rotary_dim, INTERLEAVED, PAIRS)
    first = cast(first, out.dtype.element_ty)
    second = cast(second, out.dtype.element_ty)
    write_pairs(out_rows, row_mask, first, second, rotary_dim, INTERLEAVED, PAIRS)
    if REST:
        cols = rotary_dim + tl.arange(0, REST)[None, :]
        mask = row_mask & (cols < head_dim)
        rest = tl.load(x_rows + cols, mask, other=0.0).to(tl.float32)
        tl.store(out_rows + cols, cast(rest, out.dtype.element_ty), mask)


@triton.jit
def rotary(
    q, k, out_q, out_k, positions, cos_sin,
    tokens, q_heads, k_heads, head_dim, rotary_dim,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, out_q_stride_t, out_q_stride_h, out_k_stride_t, out_k_stride_h,
    table_stride,
    INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of q [T, H, D] and k [T, K, D]."""
    program = tl.program_id(0)
    q_programs = tl.cdiv(tokens * q_heads, ROWS)
    if program < q_programs:
        turn_heads(
            q, out_q, positions, cos_sin, program * ROWS, tokens * q_heads, q_heads, head_dim, rotary_dim,
            q_stride_t, q_stride_h, out_q_stride_t, out_q_stride_h, table_stride, INTERLEAVED, ROWS, PAIRS, REST,
        )  # fmt: skip
    else:
        turn_heads(
            k, out_k, positions, cos_sin, (program - q_programs) * ROWS, tokens * k_heads, k_heads, head_dim,
            rotary_dim, k_stride_t, k_stride_h, out_k_stride_t, out_k_stride_h, table_stride,
            INTERLEAVED, ROWS, PAIRS, REST,
        )  # fmt: skip
