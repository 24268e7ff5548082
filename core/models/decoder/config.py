"""What a decoder can be: one option for every way in which published families differ.

A family's file reads a config.json into a `DecoderConfig`; the modules beside this one build the mathematics from it,
once. A family that needs an option more adds it here and where it acts, and nowhere else.

    names     how the checkpoint calls its tensors           WeightNames, MoeNames
    order     where norms and additions stand in a layer     blocks.py draws all four
    mixer     grouped-query attention or latent attention    attention.py, mla.py
    channel   gated, plain, or a mixture of experts          feed_forward.py, moe.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from octavo.core.backend.kv import KVCacheSpec
from octavo.core.backend.specs import Gate
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.layers.rope import RopeParameters, model_switch_tokens
from octavo.core.parallel.shard import Shard

NormKind = Literal["rms", "rms_plus_one", "layer"]
BlockOrder = Literal["pre", "sandwich", "post", "parallel"]
QkNorm = Literal["head", "width", "own", "own_layers", "unit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of a checkpoint's tensors, without `.weight`; llama's unless a family says otherwise.

    Attributes:
        layer: prefix of a layer's names; {} is its index. Names below are within it, from `input_norm` on.
        qkv, gate_up: the fused tensors, in place of their parts, where a checkpoint has them.
        attention_out_norm, feed_forward_out_norm: after a branch, in orders that have them.
        sinks: the whole name of the sinks' tensor.
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    qkv: str | None = None
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    attention_out_norm: str = "post_attention_layernorm"
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_out_norm: str = "post_feedforward_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    gate_up: str | None = None
    down: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """A mixture of experts in place of a layer's feed-forward. Raises CheckpointError for more choices than experts.

    Attributes:
        num_experts, top_k: E, and how many of them a token visits.
        intermediate_size: of one expert.
        scoring, renormalize, num_groups, top_groups, scale: as the op `moe_route` takes them.
        correction_bias: name of the bias that only the choice of experts sees; None has none.
        router: name of the router; router_bias: it has one.
        experts: prefix of the experts' names.
        gate, up, down: names within an expert.
        stacked: how one tensor holds all experts: None (each has tensors of its own); "halves": [E, M, 2I], gate then
            up; "interleaved": [E, M, 2I], gate and up in turn.
        split: the checkpoint holds what is stacked one expert at a time, [2I, M] and [M, I], under names with a number.
        bias: experts have biases.
        gate_function: activation of an expert.
        weigh_inputs: an expert's input is multiplied by its weight, and not its output.
        shared: prefix of an expert that every token visits; None has none; shared_intermediate_size: its width.
        shared_gate: name of a product whose sigmoid scales the shared expert; None adds it as it is.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: str = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    correction_bias: str | None = None
    router: str = "mlp.gate"
    router_bias: bool = False
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: Literal["halves", "interleaved"] | None = None
    split: bool = False
    bias: bool = False
    gate_function: Gate = "silu"
    weigh_inputs: bool = False
    shared: str | None = None
    shared_intermediate_size: int = 0
    shared_gate: str | None = None

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise CheckpointError(
                f"config.json: num_experts_per_tok is {self.top_k}, but there are {self.num_experts} experts",
                field="num_experts_per_tok",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig:
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2).

    Attributes:
        q_lora_rank: width of the queries' latent; None: queries come straight from the hidden state.
        kv_lora_rank: C, width of the keys' and values' latent, which is what the cache holds.
        nope_head_dim, rope_head_dim: elements of a query or key head without and with positions.
        v_head_dim: elements of a value head.
        latent_norm_eps: of the norms of both latents.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    latent_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only model.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        max_position: positions the checkpoint was made for.
        norm, norm_eps, norm_bias: kind of the norms of the hidden state.
        order: of a layer's norms and additions.
        ropes: each layer's rotary parameters; None: the layer has no positions.
        interleaved_rope: rotary pairs are neighbours.
        windows: each layer's window in tokens, the query's own included; None sees all.
        qk_norm: norm of q and k: of each head with one weight, of all heads together, of each head with a weight of
            its own (in one tensor, or a layer each), or without weights.
        qkv_bias, out_bias: biases of attention; mlp_bias: of the feed-forward.
        gate: activation of the gated feed-forward; None: it is plain, and `activation` is its.
        score_scale: multiplies attention scores; None: 1 / sqrt(head_dim).
        score_softcap, logit_softcap: c of c·tanh(x / c).
        sinks: every head has a sink.
        embedding_scale, residual_scale, logit_scale: factors of the embedding, of each branch, of the logits.
        tied: the output head is the embedding; head_bias: it has a bias.
        mla: latent attention in place of attention.
        moe: mixture of experts, in the layers of `moe_layers` (None: in all).
        names: of the checkpoint's tensors.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    ropes: tuple[RopeParameters | None, ...]
    norm: NormKind = "rms"
    norm_bias: bool = False
    order: BlockOrder = "pre"
    interleaved_rope: bool = False
    windows: tuple[int | None, ...] = ()
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gate: Gate | None = "silu"
    activation: str = "gelu_tanh"
    score_scale: float | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    sinks: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool = False
    head_bias: bool = False
    mla: MlaConfig | None = None
    moe: MoeConfig | None = None
    moe_layers: tuple[int, ...] | None = None
    names: WeightNames = field(default_factory=WeightNames)

    @property
    def softmax_scale(self) -> float:
        """Multiplies attention scores."""
        return 1.0 / math.sqrt(self.head_dim) if self.score_scale is None else self.score_scale

    @property
    def rotary_switch_tokens(self) -> int | None:
        """See `base.ModelConfig`. Raises CheckpointError where layers differ."""
        return model_switch_tokens(self.ropes)

    def window(self, layer: int) -> int | None:
        """A layer's attention window in tokens; None sees all."""
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.moe is not None and (self.moe_layers is None or layer in self.moe_layers)

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int, shard: Shard | None = None) -> tuple[KVCacheSpec, ...]:
        """One spec per layer, of the KV heads that a rank holds (None: of all).

        Raises:
            ConfigError: latents as integers, for which they would need scales.
        """
        if self.mla is not None:
            if not kv_dtype.is_floating_point:
                raise ConfigError(
                    "kv_cache_dtype is int8, but the latents of this model's attention have no scales; use fp8 or auto",
                    field="kv_cache_dtype",
                )
            latent = self.mla.kv_lora_rank + self.mla.rope_head_dim
            return (KVCacheSpec(1, latent, 0, kv_dtype, block_size),) * self.num_layers
        shard = shard or Shard.single()
        shard.split(self.num_heads, "num_attention_heads")  # a plan must not promise what attention refuses
        start, stop = shard.kv_heads(self.num_kv_heads)
        return tuple(
            KVCacheSpec(stop - start, self.head_dim, self.head_dim, kv_dtype, block_size, self.window(layer))
            for layer in range(self.num_layers)
        )
