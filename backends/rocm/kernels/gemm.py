"""Products on CDNA3: a program for each tile, dealt out so that neighbours share a die's cache.

    programs 0 1 2 … go to dies 0 1 2 … 7 0 1 …       tiles are renumbered: die d takes the d-th run of them, so that
         │ tile_of_program                            the programs of a die, which run at one time, share rows of x and
         ▼                                            w in its 4 MB of second-level cache
    die 0: tiles 0 … t-1     die 1: tiles t … 2t-1 …

    x, w ──global_load_dwordx4──► registers ──► LDS, num_stages deep ──MFMA──► sums in registers ──► finish

SWAP: few tokens. The weight's rows fill the matrix instruction's long side, sums are [BN, BM] and turned once.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.product import plain_tile, tile_at


@triton.jit
def tile_of_program(num_tiles, DIES: tl.constexpr):
    """The program's tile: each die takes a run of neighbours."""
    program = tl.program_id(0)
    die, turn = program % DIES, program // DIES
    return die * (num_tiles // DIES) + tl.minimum(die, num_tiles % DIES) + turn


@triton.jit(do_not_specialize=["M"])
def gemm(
    x, w, out, bias, residual, M, N, K, stride_x, stride_w, stride_out, stride_residual,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out = epilogue(x @ w.T); x and w of one float type, stored as they are."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tile_at(tile_of_program(num_m * num_n, DIES), num_m, num_n, GROUP_M)
    plain_tile(
        x, w, out, bias, residual, tile_m * BLOCK_M + tl.arange(0, BLOCK_M), M, tile_n * BLOCK_N, N, K,
        stride_x, stride_w, stride_out, stride_residual, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
    )  # fmt: skip
