"""The specs by which a backend is asked what it can do: one frozen record per op, naming every axis at once.

`supports(op, spec)` answers for the whole combination ("fp8 KV with a window at head 128"), so that no question
has to be put together from half-answers. Specs are built once, when a model is constructed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from octavo.core.backend.kv import KVLayout
from octavo.core.backend.quant import QuantizedTensor, QuantScheme

Gate = Literal["silu", "gelu_tanh", "gelu", "swiglu_clamped"]
"""How a gated pair becomes one: act(gate) * up, the activation by its name.

"swiglu_clamped" is (u + 1) * g * sigmoid(1.702 g) of g = min(gate, 7) and u = up clamped to -7 .. 7.
Source: OpenAI 2025 (gpt-oss).
"""

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu"]
"""The activations of `activation`, which has no pair."""

ScaleKind = Literal["none", "tensor", "head"]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A backend's refusal of an op at a spec."""

    reason: str


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight [N, K] as the loader will place it, part by part.

    Attributes:
        out_features, in_features: N and K on this rank.
        dtype: how plain weights are stored.
        scheme: quantisation; None for a plain weight.
        gated: the rows are [gate; up], N / 2 each, for a product with a gated epilogue.
        embedding: rows are looked up by `embed` too.
    """

    out_features: int
    in_features: int
    dtype: torch.dtype
    scheme: QuantScheme | None = None
    gated: bool = False
    embedding: bool = False

    def check_part(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """What `place` refuses, whichever backend packs the weight.

        Raises ValueError: the part does not lie inside the weight; it is stored by another scheme than the weight's;
        or the scheme's scales cover several rows, and the part does not begin where such a block does. Blocks are
        counted from row 0; in a gated weight from row 0 of each half, so that no block belongs to both.
        """
        shape, limit = list(part_NK.shape), [self.out_features, self.in_features]
        if len(shape) != 2 or row_offset < 0 or row_offset + shape[0] > limit[0] or shape[1] != limit[1]:
            raise ValueError(f"part {shape} at row {row_offset} does not lie inside a weight {limit}")
        if self.scheme is None or isinstance(part_NK, torch.Tensor):
            return
        if not part_NK.scheme.stores_like(self.scheme):
            raise ValueError(f"part at row {row_offset} is quantised by {part_NK.scheme}, the weight by {self.scheme}")
        _check_blocks(self.scheme.block_rows, row_offset, shape[0], half=limit[0] // 2 if self.gated else limit[0])


def _check_blocks(block: int, first: int, rows: int, *, half: int) -> None:
    """Raise ValueError unless rows first .. first + rows - 1 begin where a block of rows does, in each half."""
    if first % max(half, 1) % block:
        raise ValueError(
            f"a part at row {first} begins inside a block of {block} rows that share their scales; place it at a "
            f"multiple of block_rows, counted from 0 in each half of a gated weight"
        )
    if half % block and first < half < first + rows:
        raise ValueError(
            f"a part of rows {first} .. {first + rows - 1} crosses row {half}, where up begins inside a block of "
            f"{block} rows that share their scales; place gate and up apart"
        )


@dataclass(frozen=True, slots=True)
class GemmSpec:
    """A product out = epilogue(norm(x) @ W.T)."""

    weight: WeightSpec
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    norm: bool = False
    bias: bool = False
    residual: bool = False
    gate: Gate | None = None
    quantize: QuantScheme | None = None
    argmax: bool = False


@dataclass(frozen=True, slots=True)
class GroupedGemmSpec:
    """Products of consecutive row segments with E weights of one shape."""

    weight: WeightSpec
    num_experts: int
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """out += scale * (x @ A.T) @ B.T, per row's adapter. max_rank: the slots' rank, to which adapters are padded."""

    in_features: int
    out_features: int
    max_rank: int
    x_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Paged or contiguous attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    layout: KVLayout
    causal: bool = True
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    alibi: bool = False
    kv_scale: ScaleKind = "none"


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Writes, copies and transfers of KV blocks; `rotary_dim` > 0 for the fused rotary and write."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    x_dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    layout: KVLayout
    kv_scale: ScaleKind = "none"
    num_heads: int = 0
    rotary_dim: int = 0
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class RowSpec:
    """Ops on rows.

        op                 width          variant               extent
        embed              hidden                               vocabulary
        rms_norm           hidden or D    "" | "residual"
        layer_norm         hidden or D    "" | "residual"
        rotary             D              "" | "interleaved"    rotary_dim
        act_mul            2 * I          the gate
        activation         I              the kind
        quantize           K              the format            group_size
        merge_attention    D
        all_reduce_norm    hidden
        moe_route          experts        the scoring           top_k
        moe_permute        experts here                         top_k         (dtype: of the ids)
        moe_combine        hidden         "" | "residual"       top_k
        sample             vocabulary

    Attributes:
        width: elements of an input row.
        dtype: of the input rows.
        variant: what distinguishes calls of one op.
        extent: a second size where the op has one.
        weight: of `embed`, as `prepare_weight` was asked for what is looked up; None where that is not known.
    """

    width: int
    dtype: torch.dtype
    variant: str = ""
    extent: int = 0
    weight: WeightSpec | None = None


OpSpec = GemmSpec | GroupedGemmSpec | LoraSpec | AttentionSpec | CacheSpec | RowSpec
