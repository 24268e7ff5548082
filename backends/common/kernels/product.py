"""Pieces of matrix products: the order of tiles, the loads of their operands, and what happens to a finished tile.

    x [M, K]  ──rows──►  ┌───────────┐        out [M, N]: tiles in columns of GROUP_M, so that the programs that run at
    w [N, K]  ──cols──►  │ BM × BN   │        one time share their operands in the second-level cache
                         └───────────┘
                         sums in fp32 (int32 of integers) ──► scales, bias, gate, residual ──► out, rounded once

A gated weight holds gate i and up i in rows 2i and 2i + 1, so that both halves of an output are neighbours in a tile:
they meet in registers, and an output tile is BN / 2 wide.
"""

# Arguments of kernels are pointers and tiles; an annotation other than tl.constexpr would tell the compiler nothing.
import triton
import triton.language as tl

from octavo.backends.common.kernels.numeric import cast, dot
from octavo.backends.common.kernels.rows import gated


@triton.jit
def tile_at(tile, num_m, num_n, GROUP_M: tl.constexpr):
    """The tile's place (m, n): down GROUP_M rows of tiles, then to the next column."""
    per_group = GROUP_M * num_n
    first_m = (tile // per_group) * GROUP_M
    height = tl.minimum(num_m - first_m, GROUP_M)
    return first_m + (tile % per_group) % height, (tile % per_group) // height


@triton.jit
def load_tile(base, rows, row_ok, stride, first, limit, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """[rows, WIDTH] of a row-major matrix from column `first` on; 0 outside of it.

    MASKED: whether columns can pass `limit`.
    """
    columns = first + tl.arange(0, WIDTH)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=row_ok[:, None] & (columns < limit)[None, :], other=0.0)
    return tl.load(pointers, mask=row_ok[:, None], other=0.0)


@triton.jit
def finish(
    acc, out, bias, residual, rows, row_ok, first_n, N, stride_out, stride_residual,
    GATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of sums [BLOCK_M, BLOCK_N] (fp32): bias, gate, residual in this order, then one rounding.

    GATE None: no gate. `residual` may be `out`.
    """
    cols = first_n + tl.arange(0, BLOCK_N)
    if bias is not None:
        # The bias lies as the contract has it: [gate; up].
        at = cols if GATE is None else (cols % 2) * (N // 2) + cols // 2
        acc += tl.load(bias + at, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if GATE is not None:
        gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
        acc = gated(gate, up, GATE)
        cols = first_n // 2 + tl.arange(0, BLOCK_N // 2)
        N = N // 2
    mask = row_ok[:, None] & (cols < N)[None, :]
    row_64 = rows.to(tl.int64)[:, None]
    if residual is not None:
        acc += tl.load(residual + row_64 * stride_residual + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row_64 * stride_out + cols[None, :], cast(acc, out.dtype.element_ty), mask=mask)


@triton.jit
def plain_tile(
    x, w, out, bias, residual, rows, last_row, first_n, N, K, stride_x, stride_w, stride_out, stride_residual,
    GATE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One tile of out, whole, read through pointers: rows `rows` (those below last_row), BLOCK_N of w from first_n on.

    x and w of one float type. SWAP: w is the left operand, whose rows fill the long side of a matrix instruction.
    EVEN_K: BLOCK_K divides K.
    """
    cols = first_n + tl.arange(0, BLOCK_N)
    row_ok, col_ok = rows < last_row, cols < N
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        x_MK = load_tile(x, rows, row_ok, stride_x, first, K, BLOCK_K, not EVEN_K)
        w_NK = load_tile(w, cols, col_ok, stride_w, first, K, BLOCK_K, not EVEN_K)
        acc = dot(w_NK, tl.trans(x_MK), acc) if SWAP else dot(x_MK, tl.trans(w_NK), acc)
    acc_MN = tl.trans(acc) if SWAP else acc
    finish(acc_MN, out, bias, residual, rows, row_ok, first_n, N, stride_out, stride_residual, GATE, BLOCK_M, BLOCK_N)
