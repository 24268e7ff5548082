"""The llama family, and the decoder that other families are diffs of.

    hidden ──┬─ norm ─ qkv ─ rope+write ─ attention ─ o ──(+)──┬─ norm ─ gate_up ─ down ──(+)── hidden
             └─────────────────────────────────────────┘       └─────────────────────────┘

A layer is eight op calls over the buffers of `Activations`; the residual is added in the epilogue of the product that
ends a branch. After the last layer's attention, only rows whose logits are wanted go on: to the rest of that layer, the
last norm and the head.

Shape letters: T tokens, R rows whose logits are wanted, M hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.specs import Gate
from octavo.core.layers.attention import Attention
from octavo.core.layers.context import LayerContext
from octavo.core.layers.embedding import Embedding, OutputHead
from octavo.core.layers.linear import Linear, Part
from octavo.core.layers.norm import RMSNorm
from octavo.core.layers.rope import RopeParameters, RotaryTables
from octavo.core.load.stream import WeightTarget
from octavo.core.models.activations import Activations
from octavo.core.models.base import ParameterCount
from octavo.core.models.config import ConfigReader
from octavo.core.models.rope import read_rope

GATES: Mapping[str, Gate] = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activation, as a config names it, to the gate of a product. Never written to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The config of LlamaForCausalLM. Families that differ override what they change.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim: sizes.
        max_position: positions the checkpoint was made for.
        rms_norm_eps: of every norm.
        gate: activation of the feed-forward.
        rope: rotary parameters of layers that don't have their own.
        attention_bias: q, k, v and o have biases.
        mlp_bias: gate, up and down have biases.
        tie_word_embeddings: the output head is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    gate: Gate
    rope: RopeParameters
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """Read config.json strictly.

        Raises:
            CheckpointError: a field is missing, of the wrong type, or changes the mathematics in an unknown way.
        """
        reader = ConfigReader(values)
        sizes = read_sizes(reader)
        config = cls(
            **sizes,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            gate=reader.choice("hidden_act", GATES, "silu"),
            rope=read_rope(reader, sizes["head_dim"], default_theta=10_000.0),
            attention_bias=reader.boolean("attention_bias", False),
            mlp_bias=reader.boolean("mlp_bias", False),
            tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        )
        reader.finish(neutral={"partial_rotary_factor": 1.0})
        return config

    @property
    def softmax_scale(self) -> float:
        """Multiplies attention scores."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def attention_softcap(self) -> float | None:
        """Softcap of attention scores."""
        return None

    @property
    def logits_softcap(self) -> float | None:
        """Softcap of logits."""
        return None

    @property
    def embedding_scale(self) -> float:
        """Multiplies embedded rows."""
        return 1.0

    def window(self, layer: int) -> int | None:
        """A layer's attention window in tokens, the query's own included; None sees all."""
        return None

    def layer_rope(self, layer: int) -> RopeParameters:
        """A layer's rotary parameters."""
        return self.rope

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        return tuple(
            KVCacheSpec(self.num_kv_heads, self.head_dim, self.head_dim, kv_dtype, block_size, self.window(layer))
            for layer in range(self.num_layers)
        )

    def parameter_count(self) -> ParameterCount:
        """Elements of all parameters."""
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        heads = 1 if self.tie_word_embeddings else 2
        biases = (query + 2 * key + self.hidden_size) * self.attention_bias
        biases += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        return ParameterCount(
            stored=heads * self.vocab_size * self.hidden_size + self.num_layers * (attention + feed_forward),
            fp32=self.hidden_size + self.num_layers * (self._norm_elements() + biases),
        )

    def _norm_elements(self) -> int:
        """Elements of one layer's norms."""
        return 2 * self.hidden_size


def read_sizes(reader: ConfigReader) -> dict[str, int]:
    """The sizes of a decoder, checked against each other.

    Raises:
        CheckpointError: a size is missing or wrong, or heads don't divide.
    """
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.refuse("num_key_value_heads", f"it must divide num_attention_heads, {num_heads}")
    if not reader.has("head_dim") and hidden_size % num_heads:
        raise reader.refuse("num_attention_heads", f"without head_dim it must divide hidden_size, {hidden_size}")
    head_dim = reader.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.refuse("head_dim", "rotary positions need an even number")
    return {
        "vocab_size": reader.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": reader.integer("intermediate_size"),
        "num_layers": reader.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": reader.integer("max_position_embeddings"),
    }


class LlamaLayer:
    """Attention and feed-forward of one layer.

    Args:
        context: the model's.
        config: the model's.
        index: of the layer.
        tables: rotary tables, shared by the model's layers.
        kv_spec: of the layer's cache.
    """

    products_add_residual = True
    """Whether the product that ends a branch adds the residual stream; False where a norm comes in between."""

    def __init__(
        self, context: LayerContext, config: LlamaConfig, index: int, tables: RotaryTables, kv_spec: KVCacheSpec
    ) -> None:
        self.attention = context.layer(Attention)(
            context,
            config.num_heads,
            kv_spec,
            tables.get(config.layer_rope(index)),
            softmax_scale=config.softmax_scale,
            softcap=config.attention_softcap,
        )
        self._build_products(context, config, f"model.layers.{index}")
        self._norms = self._build_norms(context, config, index, f"model.layers.{index}")

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.attention_TN."""
        self._input_norm(step.hidden_TM, out=step.branch_TM)
        self._qkv(step.branch_TM, out=step.qkv_TN)
        self.attention(step.q_THD, step.k_TKD, step.v_TKD, positions_T, plans, out=step.attention_THD)

    def feed_forward(self, step: Activations) -> None:
        """Add the branch that ends with step.attention_TN, then the feed-forward's, to step.hidden_TM."""
        self._o(step.attention_TN, out=step.hidden_TM, residual=step.hidden_TM)
        self._feed_forward_norm(step.hidden_TM, out=step.branch_TM)
        self._gate_up(step.branch_TM, out=step.gated_TI)
        self._down(step.gated_TI, out=step.hidden_TM, residual=step.hidden_TM)

    def targets(self, *, norm_weights_include_one: bool) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the layer."""
        targets: dict[str, WeightTarget] = {}
        for product in (self._qkv, self._o, self._gate_up, self._down):
            targets |= product.targets()
        for norm in self._norms:
            targets |= norm.targets(weights_include_one=norm_weights_include_one)
        return targets

    def _build_products(self, context: LayerContext, config: LlamaConfig, name: str) -> None:
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size
        q_k_v = [
            Part(f"{name}.self_attn.q_proj", query),
            Part(f"{name}.self_attn.k_proj", key),
            Part(f"{name}.self_attn.v_proj", key),
        ]
        gate_up = [Part(f"{name}.mlp.gate_proj", inner), Part(f"{name}.mlp.up_proj", inner)]
        o, down = [Part(f"{name}.self_attn.o_proj", hidden)], [Part(f"{name}.mlp.down_proj", hidden)]
        residual = self.products_add_residual
        self._qkv = context.layer(Linear)(context, q_k_v, hidden, bias=config.attention_bias)
        self._o = context.layer(Linear)(context, o, query, bias=config.attention_bias, residual=residual)
        self._gate_up = context.layer(Linear)(context, gate_up, hidden, bias=config.mlp_bias, gate=config.gate)
        self._down = context.layer(Linear)(context, down, inner, bias=config.mlp_bias, residual=residual)

    def _build_norms(self, context: LayerContext, config: LlamaConfig, index: int, name: str) -> tuple[RMSNorm, ...]:
        width, eps = config.hidden_size, config.rms_norm_eps
        self._input_norm = context.layer(RMSNorm)(context, f"{name}.input_layernorm", width, eps)
        self._feed_forward_norm = context.layer(RMSNorm)(context, f"{name}.post_attention_layernorm", width, eps)
        return self._input_norm, self._feed_forward_norm


class LlamaModel:
    """Embedding, layers, norm and head. Implements `base.Model`.

    Args:
        config: from `LlamaConfig.read`.
        context: what layers are built from.
        kv_dtype, block_size: of the KV cache.
    """

    layer_type: type[LlamaLayer] = LlamaLayer

    def __init__(self, config: LlamaConfig, context: LayerContext, kv_dtype: torch.dtype, block_size: int) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self._workspace = context.workspace
        self._kv_specs = config.kv_specs(kv_dtype, block_size)
        self._activations = Activations.claim(
            context,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._embed = context.layer(Embedding)(
            context,
            "model.embed_tokens",
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_scale,
            tied=config.tie_word_embeddings,
        )
        tables = RotaryTables(context)
        self._layers = [
            self.layer_type(context, config, index, tables, spec) for index, spec in enumerate(self._kv_specs)
        ]
        self._norm = self._build_norm(context)
        self._head = context.layer(OutputHead)(context, "lm_head", self._embed, softcap=config.logits_softcap)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the activation buffers."""
        return self._workspace.nbytes

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        return self._kv_specs

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Where each tensor of the checkpoint goes; the embedding comes before a head that may be tied to it."""
        targets = self._embed.targets()
        for layer in self._layers:
            targets |= layer.targets(norm_weights_include_one=norm_weights_include_one)
        targets |= self._norm.targets(weights_include_one=norm_weights_include_one)
        return targets | self._head.targets()

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        """Give each layer its cache and its group's index."""
        for layer, cache, group in zip(self._layers, caches, group_of_layer, strict=True):
            layer.attention.bind_kv(cache, group)

    def forward(self, buffers: StepBuffers) -> None:
        """One step over the batch; see `base.Model.forward`."""
        step = self._activations.first(buffers.token_ids_T.shape[0])
        self._embed(buffers.token_ids_T, out=step.hidden_TM)
        for layer in self._layers[:-1]:
            layer.attend(step, buffers.positions_T, buffers.plans)
            layer.feed_forward(step)
        last = self._layers[-1]
        last.attend(step, buffers.positions_T, buffers.plans)
        if buffers.logit_rows_R.shape[0]:
            rows = step.take(buffers.logit_rows_R)
            last.feed_forward(rows)
            self._head(self._normed(rows), out=buffers.logits_RV)

    def _build_norm(self, context: LayerContext) -> RMSNorm:
        return context.layer(RMSNorm)(context, "model.norm", self.config.hidden_size, self.config.rms_norm_eps)

    def _normed(self, rows: Activations) -> torch.Tensor:
        """The residual stream of the wanted rows after the last norm, [R, M]."""
        self._norm(rows.hidden_TM, out=rows.branch_TM)
        return rows.branch_TM
