"""A call of attention as its kernels see it.

Keys       pages or contiguous rows of K and V, and whose they are
Rule       how scores are formed
TileGrid   how tokens and the heads of one KV head are packed into tiles of queries
constexprs what of all that a model fixes, so that kernels are compiled for it
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys and values of a call, in pages or contiguous.

    Attributes:
        k, v: [N, S, K, D], or [S, K, D] when contiguous.
        lengths: [B] KV lengths, or [B + 1] starts when contiguous.
        table: [B, max_blocks], or None.
        block_size: 0 when contiguous.
        most_keys: that a request can have, from shapes alone.
        queries: of a usual request.
    """

    k: torch.Tensor
    v: torch.Tensor
    query_start_loc: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor | None
    block_size: int
    most_keys: int
    queries: int

    @property
    def num_requests(self) -> int:
        return self.query_start_loc.shape[0] - 1

    @property
    def strides(self) -> tuple[int, ...]:
        """k's of block, slot and head, then v's. A contiguous request's first key is its "block"."""
        if self.table is not None:
            return *self.k.stride()[:3], *self.v.stride()[:3]
        return self.k.stride(0), *self.k.stride()[:2], self.v.stride(0), *self.v.stride()[:2]


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are formed; as in the contract."""

    softmax_scale: float
    causal: bool
    window: int | None
    softcap: float | None
    sinks_H: torch.Tensor | None
    alibi_slopes_H: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def factor_and_cap(self) -> tuple[float, float | None]:
        """As kernels/softmax.py takes them: scores in base 2."""
        if self.softcap is None:
            return self.softmax_scale * LOG2_E, None
        return self.softmax_scale / self.softcap, self.softcap * LOG2_E


@dataclass(frozen=True, slots=True)
class TileGrid:
    """Tiles of queries of one call.

    Attributes:
        heads: of one KV head in a tile. tokens: of a request in a tile.
        programs: of one tile: KV heads, times the chunks of their groups.
        tiles: enough for any lengths that the shapes allow.
    """

    heads: int
    tokens: int
    programs: int
    tiles: int

    @classmethod
    def of(cls, block_m: int, *, heads: int, kv_heads: int, tokens: int, requests: int) -> TileGrid:
        group = heads // kv_heads
        packed = min(group, block_m)
        per_tile = block_m // packed
        tiles = tokens // per_tile + requests if per_tile > 1 else tokens
        return cls(packed, per_tile, kv_heads * -(-group // packed), tiles)


def padded(width: int) -> int:
    """The next power of two, and no less than a matrix unit takes."""
    return max(16, 1 << (width - 1).bit_length())


def chunks(width: int) -> tuple[int, int]:
    """A head as powers of two (main, rest) where two cover it with less than one: 192 = 128 + 64; else rest is 0."""
    whole = padded(width)
    main = whole // 2
    rest = padded(width - main) if width > main else whole
    return (main, rest) if main + rest < whole else (whole, 0)


def in_fp32(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    """Whether both are widened: 8-bit floats fit any type of query, other types that differ meet in fp32."""
    return q_dtype == torch.float32 or (kv_dtype.itemsize > 1 and kv_dtype != q_dtype)


def head_stride(scale: torch.Tensor | None) -> int:
    """From one KV head's scale to the next: 0 where one serves all of them."""
    return 0 if scale is None or scale.numel() == 1 else scale.stride(0)


def constexprs(q_THD: torch.Tensor, keys: Keys, rule: Rule, grid: TileGrid) -> dict[str, int | bool]:
    """The constexprs of both kernels that a model fixes."""
    head_dim, v_head_dim = q_THD.shape[2], keys.v.shape[-1]
    main, rest = chunks(head_dim)
    return {
        "GROUP": q_THD.shape[1] // keys.k.shape[-2],
        "HEADS": grid.heads,
        "BLOCK_SIZE": keys.block_size,
        "CAUSAL": rule.causal,
        "IN_FP32": in_fp32(q_THD.dtype, keys.k.dtype),
        "D": head_dim,
        "D_MAIN": main,
        "D_REST": rest,
        "DV": v_head_dim,
        "DV_PAD": padded(v_head_dim),
    }
