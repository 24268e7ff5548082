"""The gemma3 text family, as a diff over llama.

    hidden ─┬─ norm ─ qkv ─ q/k norm ─ rope+write ─ attention ─ o ─ norm ─(+)─┬─ norm ─ gate_up ─ down ─ norm ─(+)─
            └─────────────────────────────────────────────────────────────────┘

Norms multiply by (1 + weight); each branch is normed once more before it is added; heads of q and k are normed;
embeddings are scaled by √M; layers alternate between a sliding window with its own rotary base and full attention.
Since the branch's last norm stands between its product and the residual, the addition is done by the *next* norm
(residual += branch, then norm): a layer leaves its second branch pending in `branch_TM`, and the next layer's first
norm, or the model's last one, adds it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend.ops import StepPlan
from octavo.core.layers.context import LayerContext
from octavo.core.layers.norm import RMSNorm
from octavo.core.layers.rope import RopeParameters
from octavo.core.models.activations import Activations
from octavo.core.models.config import ConfigReader
from octavo.core.models.llama import GATES, LlamaConfig, LlamaLayer, LlamaModel, read_sizes
from octavo.core.models.rope import read_rope, rope_parameters

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """The config of Gemma3ForCausalLM; `rope` is the full layers'.

    Attributes:
        layer_windows: each layer's window; None where it sees all.
        local_rope: rotary parameters of layers with a window.
        query_pre_attn_scalar: scores are multiplied by its -1/2 power.
        attn_softcap, final_softcap: of scores and of logits, as the fields say. (Hugging Face's class reads the former
            and does not apply it; no published checkpoint sets it.)
    """

    layer_windows: tuple[int | None, ...]
    local_rope: RopeParameters
    query_pre_attn_scalar: float
    attn_softcap: float | None
    final_softcap: float | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Gemma3Config:
        """Read config.json strictly.

        Raises:
            CheckpointError: a field is missing, of the wrong type, or changes the mathematics in an unknown way.
        """
        reader = ConfigReader(values)
        sizes = read_sizes(reader)
        full_rope, local_rope = _read_ropes(reader, sizes["head_dim"])
        config = cls(
            **sizes,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            gate=reader.choice("hidden_activation", GATES, "gelu_pytorch_tanh"),
            rope=full_rope,
            attention_bias=reader.boolean("attention_bias", False),
            mlp_bias=False,
            tie_word_embeddings=reader.boolean("tie_word_embeddings", True),
            layer_windows=_read_windows(reader, sizes["num_layers"]),
            local_rope=local_rope,
            query_pre_attn_scalar=reader.number("query_pre_attn_scalar", 256),
            attn_softcap=reader.optional_number("attn_logit_softcapping"),
            final_softcap=reader.optional_number("final_logit_softcapping"),
        )
        reader.finish(neutral={"hidden_act": "gelu_pytorch_tanh"})  # hidden_activation is the one that counts
        return config

    @property
    def softmax_scale(self) -> float:
        """Multiplies attention scores."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar)

    @property
    def attention_softcap(self) -> float | None:
        """Softcap of attention scores."""
        return self.attn_softcap

    @property
    def logits_softcap(self) -> float | None:
        """Softcap of logits."""
        return self.final_softcap

    @property
    def embedding_scale(self) -> float:
        """Multiplies embedded rows."""
        return math.sqrt(self.hidden_size)

    def window(self, layer: int) -> int | None:
        """A layer's attention window in tokens; None sees all."""
        return self.layer_windows[layer]

    def layer_rope(self, layer: int) -> RopeParameters:
        """A layer's rotary parameters."""
        return self.rope if self.layer_windows[layer] is None else self.local_rope

    def _norm_elements(self) -> int:
        return 4 * self.hidden_size + 2 * self.head_dim


class Gemma3Layer(LlamaLayer):
    """A layer that finds a pending branch in step.branch_TM (but the first one) and leaves one there."""

    products_add_residual = False

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Add the pending branch to step.hidden_TM, write K and V, and fill step.attention_TN."""
        if self._is_first:
            self._input_norm(step.hidden_TM, out=step.branch_TM)
        else:
            self._input_norm(step.branch_TM, out=step.branch_TM, residual=step.hidden_TM)
        self._qkv(step.branch_TM, out=step.qkv_TN)
        self._q_norm(step.q_THD, out=step.q_THD)
        self._k_norm(step.k_TKD, out=step.k_TKD)
        self.attention(step.q_THD, step.k_TKD, step.v_TKD, positions_T, plans, out=step.attention_THD)

    def feed_forward(self, step: Activations) -> None:
        """Add the attention branch to step.hidden_TM; leave the feed-forward's pending."""
        branch_TM = step.branch_TM
        self._o(step.attention_TN, out=branch_TM)
        self._attention_out_norm(branch_TM, out=branch_TM)
        self._feed_forward_norm(branch_TM, out=branch_TM, residual=step.hidden_TM)
        self._gate_up(branch_TM, out=step.gated_TI)
        self._down(step.gated_TI, out=branch_TM)
        self._feed_forward_out_norm(branch_TM, out=branch_TM)

    def _build_norms(self, context: LayerContext, config: LlamaConfig, index: int, name: str) -> tuple[RMSNorm, ...]:
        def norm(part: str, width: int, *, residual: bool = False) -> RMSNorm:
            return context.layer(RMSNorm)(
                context, f"{name}.{part}", width, config.rms_norm_eps, residual=residual, plus_one=True
            )

        hidden, head = config.hidden_size, config.head_dim
        self._is_first = index == 0
        self._input_norm = norm("input_layernorm", hidden, residual=not self._is_first)
        self._q_norm = norm("self_attn.q_norm", head)
        self._k_norm = norm("self_attn.k_norm", head)
        self._attention_out_norm = norm("post_attention_layernorm", hidden)
        self._feed_forward_norm = norm("pre_feedforward_layernorm", hidden, residual=True)
        self._feed_forward_out_norm = norm("post_feedforward_layernorm", hidden)
        return (
            self._input_norm,
            self._q_norm,
            self._k_norm,
            self._attention_out_norm,
            self._feed_forward_norm,
            self._feed_forward_out_norm,
        )


class Gemma3Model(LlamaModel):
    """The llama model with Gemma's layers, whose last branch is added by the last norm."""

    layer_type = Gemma3Layer

    def _build_norm(self, context: LayerContext) -> RMSNorm:
        return context.layer(RMSNorm)(
            context, "model.norm", self.config.hidden_size, self.config.rms_norm_eps, residual=True, plus_one=True
        )

    def _normed(self, rows: Activations) -> torch.Tensor:
        self._norm(rows.branch_TM, out=rows.branch_TM, residual=rows.hidden_TM)
        return rows.branch_TM


def _read_windows(reader: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window, from `layer_types` or from the older "every n-th layer is full"."""
    period = reader.integer("sliding_window_pattern", reader.integer("_sliding_window_pattern", 6))
    types = reader.choices("layer_types", (SLIDING, FULL), num_layers)
    if types is None:
        types = tuple(FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers))
    if SLIDING not in types:
        reader.skip("sliding_window")
        return (None,) * num_layers
    window = reader.integer("sliding_window", 4096)
    return tuple(window if kind == SLIDING else None for kind in types)


def _read_ropes(reader: ConfigReader, head_dim: int) -> tuple[RopeParameters, RopeParameters]:
    """Rotary parameters of full layers and of layers with a window; only the former are ever scaled in old configs."""
    local_theta = reader.number("rope_local_base_freq", 10_000.0)
    nested = reader.section("rope_parameters")
    if nested is None:
        full = read_rope(reader, head_dim, default_theta=1_000_000.0)
        return full, RopeParameters(local_theta, head_dim)
    if reader.has("rope_scaling"):
        raise reader.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
    theta = reader.number("rope_theta", 1_000_000.0)
    full = rope_parameters(nested.section(FULL), head_dim, theta=theta)
    local = rope_parameters(nested.section(SLIDING), head_dim, theta=local_theta)
    nested.finish()
    return full, local
