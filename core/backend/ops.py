"""The Ops protocol: what a backend computes. Semantics in full are `reference/`, op by op in plain torch.

Shape letters: T tokens, R rows, B requests, H query heads, K KV heads (in a product: in_features), N out_features,
D head dim, M hidden, E experts, V vocabulary, P positions, L segments.

Rules for every op:
  * it writes the caller's `out=` (which may alias an input only where said so) and allocates nothing that lasts;
  * it does not synchronise, and bakes in no scalar that varies from step to step;
  * the last axis of every tensor has stride 1, leading axes may have any stride;
  * an input it can't take was refused by `supports()`; called all the same, it raises UnsupportedOp.
A backend implements the ops it has and leaves the others out; `opset.OpSet` fills the gaps from the composites'
decompositions and from the reference, once, when a model binds its ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from octavo.core.backend.comm import Communicator
from octavo.core.backend.kv import AttentionMetadata, KVCache
from octavo.core.backend.quant import QuantizedTensor, QuantScheme
from octavo.core.backend.specs import ActivationKind, Gate, OpSpec, Unsupported, WeightSpec


@dataclass(slots=True)
class StepPlan:
    """One step's work as one KV group's attention sees it. Backends subclass it to hold splits and tiles."""

    meta: AttentionMetadata


@runtime_checkable
class PackedWeight(Protocol):
    """A weight in the form its backend's product reads; only that backend looks inside.

    Attributes:
        spec: what was asked for.
        nbytes: bytes it occupies on the device.
    """

    spec: WeightSpec
    nbytes: int

    def place(self, part_NK: torch.Tensor | QuantizedTensor, row_offset: int) -> None:
        """Fill rows row_offset.. from a plain (any float dtype) or quantised part, as the loader streams.

        Raises ValueError as `WeightSpec.check_part` says, which a backend calls first.
        """

    def rows(self, ids_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, K] = the weight's rows, widened to out's dtype."""

    def dense(self) -> torch.Tensor:
        """The plain weight [N, K] in fp32, for the reference ops. Slow; allocates."""


@dataclass(frozen=True, slots=True)
class NormPrologue:
    """RMSNorm of x before the product: weight_K fp32, eps."""

    weight_K: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What happens to a product before it is written, in this order: bias, gate, residual, quantize or argmax.

    Attributes:
        bias_N: added to each row.
        gate: the product is [gate | up]; out [T, N / 2] is the pair as `specs.Gate` says.
        residual: [T, out width], added; may be `out` itself.
        quantize: out holds codes and out_scales their scales.
        argmax: out [T] int64 holds the lowest id of each row's maximum.
    """

    bias_N: torch.Tensor | None = None
    gate: Gate | None = None
    residual: torch.Tensor | None = None
    quantize: QuantScheme | None = None
    out_scales: torch.Tensor | None = None
    argmax: bool = False


class Ops(Protocol):
    """The operations of a backend. See the module's rules, and `reference/` for exact semantics."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        """None when `op` runs natively at `spec`, else why not. Pure; asked at start, never in a step."""

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        """Splits, tiles and segments of one step for one KV group, into persistent buffers.

        Runs once per step and group, outside any captured region.
        """

    def prepare_weight(self, spec: WeightSpec) -> PackedWeight:
        """Allocate a weight's packed form; the loader then places its parts."""

    # -- products ---------------------------------------------------------------------------------------------
    def gemm(
        self,
        x_TK: torch.Tensor,
        w: PackedWeight,
        *,
        out: torch.Tensor,
        prologue: NormPrologue | None = None,
        epilogue: Epilogue | None = None,
    ) -> None:
        """out = epilogue(prologue(x) @ w.T), accumulated in fp32."""

    def grouped_gemm(
        self,
        x_TK: torch.Tensor,
        weights: list[PackedWeight],
        segment_start: torch.Tensor,
        *,
        out: torch.Tensor,
        gate: Gate | None = None,
    ) -> None:
        """Rows segment_start[e] .. segment_start[e + 1] of x times weights[e].T; segment_start is [E + 1] int32.

        Segments begin at row 0 and may end before the last row: what out holds behind them is undefined.
        """

    def lora_gemm(
        self,
        x_TK: torch.Tensor,
        a_LRK: torch.Tensor,
        b_LNR: torch.Tensor,
        scales_L: torch.Tensor,
        adapter_T: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        """out[t] += scales[i] * b[i] @ (a[i] @ x[t]) for i = adapter_T[t]; -1 leaves the row alone, bit for bit.

        Shapes: L slots of rank R, a [L, R, K] and b [L, N, R] in x's dtype, scales [L] fp32; an adapter of a lower rank
        is padded with zeros, an empty slot is zeros throughout. adapter [T] int32, -1 or below L.
        What stands in a slot may change between calls, recorded or not: a call reads the slots as they then are.
        Numerics: a[i] @ x[t] is not rounded to x's dtype.
        Source: Hu et al. 2021 (LoRA); Chen et al. 2023 (Punica).
        """

    def quantize(self, x_TK: torch.Tensor, scheme: QuantScheme, *, out: torch.Tensor, scales: torch.Tensor) -> None:
        """Codes and scales of rows or groups: symmetric, saturating, round to nearest even."""

    # -- rows -------------------------------------------------------------------------------------------------
    def embed(self, ids_T: torch.Tensor, w: PackedWeight, *, out: torch.Tensor, scale: float = 1.0) -> None:
        """out[t] = scale * w[ids[t]]."""

    def rms_norm(
        self,
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out = x / sqrt(mean(x²) + eps) * weight, over the last axis; x and out may be [T, M] or [T, H, D].

        With residual: residual += x first (in place), then its norm goes to out. out may be x.
        Source: Zhang & Sennrich 2019.
        """

    def layer_norm(
        self,
        x: torch.Tensor,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        eps: float,
        bias_M: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last axis; shapes as for `rms_norm`.

        The variance is the mean of (x - mean(x))². With residual: residual += x first (in place), then its norm goes to
        out. out may be x.
        Source: Ba et al. 2016.
        """

    def rotary(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        *,
        out_q: torch.Tensor,
        out_k: torch.Tensor,
        interleaved: bool = False,
    ) -> None:
        """Rotary embedding of the first R elements of each head; outputs may alias inputs.

        cos_sin [P, R] fp32: cosines in the first half of a row, sines in the second. Not interleaved: element i
        pairs with i + R / 2; interleaved: 2i with 2i + 1. Source: Su et al. 2021 (RoFormer).
        """

    def act_mul(self, x: torch.Tensor, *, out: torch.Tensor, gate: Gate) -> None:
        """out [T, I] = the pair of x[:, :I] and x[:, I:] as `specs.Gate` says: act(gate) * up."""

    def activation(self, x: torch.Tensor, *, out: torch.Tensor, kind: ActivationKind) -> None:
        """out = act(x), element by element, [T, I]; out may be x.

        silu x·sigmoid(x), gelu x·Φ(x), gelu_tanh its tanh approximation, relu max(x, 0). NaN stays NaN.
        Source: Hendrycks & Gimpel 2016 (GELU, SiLU).
        """

    # -- the KV cache -----------------------------------------------------------------------------------------
    def write_kv(
        self,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv: KVCache,
        slot_mapping_T: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Store each token's K and V at its slot, rounded to nearest even; slot -1 writes nothing.

        Scales are fp32, [1] or [K], for caches of one byte an element: what is stored is x / scale. 8-bit floats
        saturate at their largest value, int8 at -127 and 127.
        """

    def rope_write_kv(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
        kv: KVCache,
        slot_mapping_T: torch.Tensor,
        *,
        out_q: torch.Tensor,
        interleaved: bool = False,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """`rotary` of q and k, then `write_kv` of the rotated k and v, in one pass. k is left as it was."""

    def copy_blocks(self, kv: KVCache, source_destination: torch.Tensor) -> None:
        """Copy whole blocks, pair after pair in order; [C, 2] int64."""

    def gather_blocks(self, kv: KVCache, block_ids: torch.Tensor, *, out_k: torch.Tensor, out_v: torch.Tensor) -> None:
        """Blocks into canonical NHD buffers [n, S, K, D]."""

    def scatter_blocks(self, kv: KVCache, block_ids: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Canonical NHD buffers [n, S, K, D] into blocks."""

    # -- attention --------------------------------------------------------------------------------------------
    def paged_attention(
        self,
        q_THD: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        causal: bool = True,
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        alibi_slopes_H: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Attention of ragged queries over paged KV.

        Shapes: q [T, H, D], out [T, H, Dv] in q's dtype; lse [T, H] fp32, natural log, sinks included; scales fp32, [1]
            or [K], by which a stored K or V (8-bit floats, int8) is multiplied.
        Units: window in tokens, the query's own included; the causal mask is aligned bottom-right.
        Order: scale, softcap c·tanh(s / c), ALiBi slope·(key - row), mask, softmax whose denominator the sinks join.
        Requires: write_kv ran for this step.  Mutates: nothing.
        Numerics: fp32 accumulation; a row that sees no key gives 0 and lse -inf, sinks or not.
        Errors: UnsupportedOp.
        Source: Kwon et al. 2023 (PagedAttention); Dao 2023 (FlashAttention-2).
        """

    def attention(
        self,
        q_THD: torch.Tensor,
        k_SKD: torch.Tensor,
        v_SKD: torch.Tensor,
        query_start_loc: torch.Tensor,
        kv_start_loc: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        causal: bool = True,
        softmax_scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
    ) -> None:
        """The same over ragged contiguous K and V; both start_loc are [B + 1] int32."""

    def merge_attention(
        self,
        out_a: torch.Tensor,
        lse_a: torch.Tensor,
        out_b: torch.Tensor,
        lse_b: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        """Combine attention over two disjoint sets of keys, [T, H, D] and [T, H]; a part of lse -inf adds nothing.

        Source: Milakov & Gimelshein 2018 (online softmax).
        """

    def write_mla(
        self, latent_TC: torch.Tensor, k_rope_TR: torch.Tensor, kv: KVCache, slot_mapping_T: torch.Tensor
    ) -> None:
        """Store each token's compressed latent [C] and shared rotary key [R] side by side; slot -1 writes nothing."""

    def mla_attention(
        self,
        q_latent_THC: torch.Tensor,
        q_rope_THR: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        softmax_scale: float,
    ) -> None:
        """Absorbed multi-head latent attention: scores over latent and rotary part, out [T, H, C] over the latent.

        Source: DeepSeek-AI 2024 (DeepSeek-V2), absorbed form.
        """

    # -- mixtures of experts, collectives, sampling -----------------------------------------------------------
    def moe_route(
        self,
        logits_TE: torch.Tensor,
        *,
        top_k: int,
        out_weights: torch.Tensor,
        out_ids: torch.Tensor,
        scoring: str = "softmax",
        renormalize: bool = True,
        bias_E: torch.Tensor | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        """The top_k experts of each row, highest first, ties to the lowest id; out_weights and out_ids [T, top_k].

        scoring: "softmax" or "sigmoid"; bias_E is added for the choice only (DeepSeek-V3's correction). A NaN row
        gets ids 0..top_k-1 and NaN weights.
        """

    def moe_permute(
        self,
        ids_TK: torch.Tensor,
        *,
        first_expert: int,
        out_rows: torch.Tensor,
        out_places: torch.Tensor,
        segment_start: torch.Tensor,
    ) -> None:
        """Sort (token, choice) pairs by expert, as `grouped_gemm` wants its rows; experts that are elsewhere left out.

        Here are experts first_expert .. first_expert + E - 1, E told by segment_start's length; elsewhere is any other
        id, -1 too. The sort is stable: within an expert pairs stand in the order t * K + k.
        Outputs:
            out_rows [T * K] int64: the token of each sorted row; 0 in the tail that no pair fills.
            out_places [T, K] int64: the sorted row of each pair; -1 where its expert is not here.
            segment_start [E + 1] int32: expert e has sorted rows segment_start[e] .. segment_start[e + 1] - 1.
        ids are int32 or int64. No size depends on the ids, so nothing need be read back to the host.
        """

    def moe_combine(
        self,
        y_RM: torch.Tensor,
        places_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        """out[t] = residual[t] + Σ_k weights[t, k] * y[places[t, k]]; the way back from `moe_permute`.

        Shapes: y [R, M], places [T, K] int64 (-1: adds nothing, whatever its weight), weights [T, K], out and residual
        [T, M] in y's dtype. out may be residual; without one the sum begins at 0.
        Numerics: in fp32, in order of k, the residual first; rounded once. Rows of y that no place names are not read.
        """

    def all_reduce_norm(
        self,
        x_TM: torch.Tensor,
        comm: Communicator,
        weight_M: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor,
        eps: float,
    ) -> None:
        """residual += sum of x over the ranks, then its RMSNorm goes to out."""

    def sample(
        self,
        logits_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
        uniform_R: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None:
        """out [R] int64: temperature, top-k, top-p, min-p, then the inverse CDF at uniform_R in [0, 1).

        temperature 0 takes the lowest id of the maximum. A row without a finite maximum (all -inf, NaN) gets -1.
        """


OP_NAMES = (
    "gemm", "grouped_gemm", "lora_gemm", "quantize", "embed", "rms_norm", "layer_norm", "rotary", "act_mul",
    "activation", "write_kv", "rope_write_kv", "copy_blocks", "gather_blocks", "scatter_blocks", "paged_attention",
    "attention", "merge_attention", "write_mla", "mla_attention", "moe_route", "moe_permute", "moe_combine",
    "all_reduce_norm", "sample",
)  # fmt: skip
"""Every op of the contract, in the protocol's order."""
