"""Products of experts on CDNA3: a program for each tile that there may be; those beyond the last real one do nothing.

    programs 0 … P - 1      a tile is (rows of one expert) x (BLOCK_N of its weight), numbered along an expert's weight;
                            P is fixed by the shapes; how many tiles there are is read on the device

Each die takes a run of neighbouring tiles, so that an expert's rows are in the cache of one die, and its weight too.
"""

import triton
import triton.language as tl

from octavo.backends.common.kernels.codes import codes_tile
from octavo.backends.common.kernels.experts import expert_of_tile, of_expert, tiles_of_experts
from octavo.backends.common.kernels.product import plain_tile
from octavo.backends.common.kernels.scaled import scaled_tile
from octavo.backends.rocm.kernels.gemm import tile_of_program


@triton.jit
def grouped_gemm(
    x, w, w_addresses, segment_start, out, E, N, K, stride_x, stride_w, stride_out,
    GATE: tl.constexpr, EVEN_K: tl.constexpr, E_PAD: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """out[rows of e] = x[rows of e] @ w[e].T, gated; x and the weights of one float type."""
    starts, ends, last_tiles = tiles_of_experts(segment_start, E, BLOCK_M, E_PAD)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.max(last_tiles, axis=0) * num_n
    if tl.program_id(0) < num_tiles:
        tile = tile_of_program(num_tiles, DIES)
        expert, first, end = expert_of_tile(tile // num_n, starts, ends, last_tiles, BLOCK_M, E_PAD)
        plain_tile(
            x, of_expert(w, w_addresses, expert), out, None, None, first + tl.arange(0, BLOCK_M), end,
            tile % num_n * BLOCK_N, N, K, stride_x, stride_w, stride_out, 0,
            GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
        )  # fmt: skip


@triton.jit
def grouped_codes(
    x, w, scales, offsets, x_scales, w_addresses, scale_addresses, offset_addresses, segment_start, out, E, N, K, half,
    num_groups, stride_x, stride_w, stride_scales, stride_x_scales, stride_out,
    FORM: tl.constexpr, GROUP: tl.constexpr, X_GROUP: tl.constexpr, COMPUTE: tl.constexpr, GATE: tl.constexpr,
    EVEN_K: tl.constexpr, E_PAD: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same with weights of codes that are widened in registers."""
    starts, ends, last_tiles = tiles_of_experts(segment_start, E, BLOCK_M, E_PAD)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.max(last_tiles, axis=0) * num_n
    if tl.program_id(0) < num_tiles:
        tile = tile_of_program(num_tiles, DIES)
        expert, first, end = expert_of_tile(tile // num_n, starts, ends, last_tiles, BLOCK_M, E_PAD)
        codes_tile(
            x, of_expert(w, w_addresses, expert),
            None if scales is None else of_expert(scales, scale_addresses, expert),
            None if offsets is None else of_expert(offsets, offset_addresses, expert),
            x_scales, out, None, None, first + tl.arange(0, BLOCK_M), end, tile % num_n * BLOCK_N, N, K, half,
            num_groups, stride_x, stride_w, stride_scales, stride_x_scales, stride_out, 0,
            FORM, GROUP, X_GROUP, COMPUTE, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def grouped_scaled(
    x, w, x_scales, scales, w_addresses, scale_addresses, segment_start, out, E, N, K,
    stride_x, stride_w, stride_x_scales, stride_scales, stride_out,
    X_GROUP: tl.constexpr, W_GROUP: tl.constexpr, X_ENCODING: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr,
    E_PAD: tl.constexpr, DIES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """The same with codes on both sides."""
    starts, ends, last_tiles = tiles_of_experts(segment_start, E, BLOCK_M, E_PAD)
    num_n = tl.cdiv(N, BLOCK_N)
    num_tiles = tl.max(last_tiles, axis=0) * num_n
    if tl.program_id(0) < num_tiles:
        tile = tile_of_program(num_tiles, DIES)
        expert, first, end = expert_of_tile(tile // num_n, starts, ends, last_tiles, BLOCK_M, E_PAD)
        scaled_tile(
            x, of_expert(w, w_addresses, expert), x_scales, of_expert(scales, scale_addresses, expert), out, None, None,
            first + tl.arange(0, BLOCK_M), end, tile % num_n * BLOCK_N, N, K,
            stride_x, stride_w, stride_x_scales, stride_scales, stride_out, 0,
            X_GROUP, W_GROUP, X_ENCODING, 0, GATE, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K, SWAP,
        )  # fmt: skip
