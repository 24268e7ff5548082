"""Products on Hopper: persistent programs that take tile after tile, fed by the tensor memory accelerator.

    programs 0 … units - 1       program p computes tiles p, p + P, p + 2P, …; loads of its next tile overlap the
                                 epilogue of the last (the two loops are flattened into one pipeline)

    x, w ──descriptors: cp.async.bulk──► shared memory, num_stages deep ──wgmma──► sums in registers ──► finish
         ──pointers: cp.async────────►   the same, where a row of x does not begin at a multiple of 16 bytes

SWAP: few tokens. The weight's rows fill wgmma's 64 and the tokens its 8 .. 256, sums are [BN, BM] and turned once.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.backends.common.kernels.numeric import dot
from octavo.backends.common.kernels.product import finish, load_tile, tile_at


@triton.jit(do_not_specialize=["M"])
def gemm(
    x, w, out, bias, residual, M, N, K, stride_x, stride_w, stride_out, stride_residual,
    GATE: tl.constexpr, DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ w.T); x and w of one float type, stored as they are."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_at(tile, num_m, num_n, GROUP_M)
        rows, cols = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
        for first in tl.range(0, K, BLOCK_K):
            if DESCRIPTORS:
                x_MK, w_NK = x.load([tile_m * BLOCK_M, first]), w.load([tile_n * BLOCK_N, first])
            else:
                x_MK = load_tile(x, rows, rows < M, stride_x, first, K, BLOCK_K, not EVEN_K)
                w_NK = load_tile(w, cols, cols < N, stride_w, first, K, BLOCK_K, not EVEN_K)
            acc = dot(w_NK, tl.trans(x_MK), acc) if SWAP else dot(x_MK, tl.trans(w_NK), acc)
        acc_MN = tl.trans(acc) if SWAP else acc
        finish(
            acc_MN, out, bias, residual, rows, rows < M, tile_n * BLOCK_N, N, stride_out, stride_residual,
            GATE, BLOCK_M, BLOCK_N,
        )  # fmt: skip


def describe(matrix: torch.Tensor, columns: int, block: list[int]) -> TensorDescriptor:
    """What the tensor memory accelerator knows of a row-major matrix: its first columns, read block by block."""
    return TensorDescriptor(matrix, [matrix.shape[0], columns], [matrix.stride(0), 1], block)


def can_describe(matrix: torch.Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and lie one behind the other."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0 and matrix.stride(0) >= matrix.shape[1]
