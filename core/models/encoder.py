"""A BERT-style encoder: every token of a text sees every other. Implements `base.Model`; its output is hidden rows.

    token ids ─ word rows ──(+)── norm ─┬─ qkv ─ attention ─ out ──(+)── norm ─┬─ up ─ act ─ down ──(+)── norm ─► …
    position and text of a pair ──┘     └──────────────────────────┘           └────────────────────┘

Norms come after the additions. Nothing is kept between steps, so there is no KV cache: a step holds whole texts, and
K and V are read where the product left them. The texts' bounds are those of the step's only plan, whose blocks are the
scheduler's and hold no bytes.

Positions and the texts of a pair are looked up at once, in a table made of both: row s·P + p holds the p-th position's
row plus that of text s. Whoever fills `positions_T` adds P to the positions of a pair's second text.

Source: Devlin et al. 2019 (BERT); Liu et al. 2019 (RoBERTa), whose positions begin after the padding's.
Shape letters: T tokens, R rows wanted, M hidden, H heads on this rank, D head dim, P positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache, KVCacheSpec, KVLayout
from octavo.core.backend.specs import ActivationKind, AttentionSpec, GemmSpec, RowSpec, WeightSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.embedding import Embedding
from octavo.core.layers.linear import Linear, Part
from octavo.core.layers.norm import LayerNorm
from octavo.core.load.stream import WeightTarget
from octavo.core.models.decoder.feed_forward import FeedForward, FeedForwardNames
from octavo.core.parallel.shard import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """What an encoder is made of.

    Attributes:
        vocab_size, hidden_size, intermediate_size, num_layers, num_heads: sizes.
        table_positions: rows of the checkpoint's position table.
        first_position: the row of a text's first token.
        token_types: texts that the model tells apart.
        norm_eps: of every norm.
        activation: of the feed-forward.
        prefix: of all names in the checkpoint.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    table_positions: int
    first_position: int
    token_types: int
    norm_eps: float
    activation: ActivationKind
    prefix: str

    @property
    def max_position(self) -> int:
        """P: the longest text, in tokens."""
        return self.table_positions - self.first_position

    @property
    def rotary_switch_tokens(self) -> int | None:
        """None: positions are not rotary."""
        return None

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int, shard: Shard | None = None) -> tuple[KVCacheSpec, ...]:
        """None: nothing is kept."""
        return ()


class PositionTable:
    """Rows for (text of a pair, position). Whole on every rank.

    Args:
        context, config: the model's.
    """

    def __init__(self, context: LayerContext, config: EncoderConfig) -> None:
        rows, width = config.token_types * config.max_position, config.hidden_size
        # A product nobody takes: it says how a weight whose rows are looked up is packed.
        spec = GemmSpec(
            weight=WeightSpec(rows, width, context.dtype, embedding=True),
            x_dtype=context.activation_dtype,
            out_dtype=torch.float32,
        )
        self._config = config
        self._weight = context.opset.prepare_weight(spec)
        row = RowSpec(width, context.activation_dtype, extent=rows)
        self._embed = context.opset.bind("embed", row, product=spec)
        self._parts: dict[str, torch.Tensor] = {}

    def __call__(self, positions_T: torch.Tensor, *, out: torch.Tensor) -> None:
        """out [T, M] = the rows."""
        self._embed(positions_T, self._weight, out=out)

    def targets(self) -> dict[str, WeightTarget]:
        """Both of the checkpoint's tables; the weight is filled once the second of them came."""
        config, name = self._config, f"{self._config.prefix}embeddings"
        return {
            f"{name}.position_embeddings.weight": WeightTarget(
                (config.table_positions, config.hidden_size), lambda table: self._take("positions", table)
            ),
            f"{name}.token_type_embeddings.weight": WeightTarget(
                (config.token_types, config.hidden_size), lambda table: self._take("types", table)
            ),
        }

    def _take(self, part: str, table: torch.Tensor) -> None:
        self._parts[part] = table.to(torch.float32, copy=True)  # the loader's memory serves the next tensor
        if len(self._parts) == 2:
            positions_PM = self._parts["positions"][self._config.first_position :]
            for text, row_M in enumerate(self._parts["types"]):
                self._weight.place(positions_PM + row_M, text * self._config.max_position)
            self._parts.clear()


class EncoderLayer:
    """Attention and feed-forward of one layer.

    Args:
        context, config: the model's.
        index: of the layer.
    """

    def __init__(self, context: LayerContext, config: EncoderConfig, index: int) -> None:
        name, width = f"{config.prefix}encoder.layer.{index}", config.hidden_size
        self._head_dim = width // config.num_heads
        start, stop = context.shard.split(config.num_heads, "num_attention_heads")
        self._num_heads = stop - start
        kept = (start * self._head_dim, stop * self._head_dim)
        parts = [Part(f"{name}.attention.self.{each}", width, (kept,)) for each in ("query", "key", "value")]
        self._qkv = context.layer(Linear)(context, parts, width, bias=True)
        self._out = context.layer(Linear)(
            context, [Part(f"{name}.attention.output.dense", width)], width, bias=True, residual=True, columns=kept
        )
        self._feed_forward = FeedForward(
            context,
            FeedForwardNames(up=f"{name}.intermediate.dense", down=f"{name}.output.dense"),
            width,
            config.intermediate_size,
            gate=None,
            activation=config.activation,
            bias=True,
            residual=True,
        )
        self._attention_norm = _norm(context, config, f"{name}.attention.output.LayerNorm")
        self._output_norm = _norm(context, config, f"{name}.output.LayerNorm")
        local = self._num_heads * self._head_dim
        self._qkv_TN = context.workspace.claim("qkv", 3 * local, dtype=context.activation_dtype)
        self._mixed_TN = context.workspace.claim("mixed", local, dtype=context.activation_dtype)
        self._attention = context.opset.bind("attention", self._attention_spec(context))

    def _attention_spec(self, context: LayerContext) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self._num_heads,
            num_kv_heads=self._num_heads,
            head_dim=self._head_dim,
            v_head_dim=self._head_dim,
            q_dtype=context.activation_dtype,
            kv_dtype=context.activation_dtype,
            block_size=1,  # K and V lie in one piece
            layout=KVLayout.NHD,
            causal=False,
        )

    def __call__(self, hidden_TM: torch.Tensor, text_start_loc: torch.Tensor) -> None:
        """One layer, in place; text_start_loc [B + 1] int32 bounds the texts."""
        count = len(hidden_TM)
        qkv_TN, mixed_TN = self._qkv_TN[:count], self._mixed_TN[:count]
        self._qkv(hidden_TM, out=qkv_TN)
        q_THD, k_THD, v_THD = qkv_TN.unflatten(1, (3, self._num_heads, self._head_dim)).unbind(1)
        self._attention(
            q_THD,
            k_THD,
            v_THD,
            text_start_loc,
            text_start_loc,
            out=mixed_TN.unflatten(1, (self._num_heads, self._head_dim)),
            causal=False,
            softmax_scale=1.0 / math.sqrt(self._head_dim),
        )
        self._out(mixed_TN, out=hidden_TM, residual=hidden_TM)
        self._attention_norm(hidden_TM, out=hidden_TM)
        self._feed_forward(hidden_TM, out=hidden_TM, residual=hidden_TM)
        self._output_norm(hidden_TM, out=hidden_TM)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the layer."""
        filled: tuple[Any, ...] = (
            self._qkv, self._out, self._attention_norm, self._feed_forward, self._output_norm,
        )  # fmt: skip
        return {name: target for part in filled for name, target in part.targets().items()}


class EncoderModel:
    """Embeddings and layers.

    Args:
        config: from the family's reader.
        context: what layers are built from.
        kv_dtype, block_size: of a KV cache that there is not.
        has_head: must be False: an encoder's heads are the pooler's.
    """

    def __init__(
        self,
        config: EncoderConfig,
        context: LayerContext,
        kv_dtype: torch.dtype,
        block_size: int,
        *,
        has_head: bool = False,
    ) -> None:
        assert not has_head
        self.config = config
        self.vocab_size = config.hidden_size
        self.max_position = config.max_position
        self._workspace = context.workspace
        self._hidden_TM = context.workspace.claim("hidden", config.hidden_size, dtype=context.activation_dtype)
        self._place_TM = context.workspace.claim("place", config.hidden_size, dtype=context.activation_dtype)
        self._words = context.layer(Embedding)(
            context,
            f"{config.prefix}embeddings.word_embeddings",
            config.vocab_size,
            config.hidden_size,
            tied=False,
        )
        self._places = PositionTable(context, config)
        self._norm = _norm(context, config, f"{config.prefix}embeddings.LayerNorm", residual=True)
        self._layers = [EncoderLayer(context, config, index) for index in range(config.num_layers)]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the activation buffers."""
        return self._workspace.nbytes

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """None: nothing is kept."""
        return ()

    def kv_scales(self) -> tuple[None, ...]:
        """None: nothing is kept."""
        return ()

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Where each tensor of the checkpoint goes."""
        targets = self._words.targets() | self._places.targets() | self._norm.targets()
        for layer in self._layers:
            targets |= layer.targets()
        return targets

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        """There is none."""
        assert not caches
        assert not group_of_layer

    def forward(self, buffers: StepBuffers) -> None:
        """One step over whole texts; `logits_RV` gets the hidden rows that are wanted."""
        count = len(buffers.token_ids_T)
        hidden_TM, place_TM = self._hidden_TM[:count], self._place_TM[:count]
        self._words(buffers.token_ids_T, out=hidden_TM)
        self._places(buffers.positions_T, out=place_TM)
        self._norm(place_TM, out=hidden_TM, residual=hidden_TM)
        text_start_loc = buffers.plans[0].meta.query_start_loc
        for layer in self._layers:
            layer(hidden_TM, text_start_loc)
        wanted_RM = self._place_TM[: len(buffers.logit_rows_R)]
        torch.index_select(hidden_TM, 0, buffers.logit_rows_R, out=wanted_RM)
        buffers.logits_RV.copy_(wanted_RM)


def _norm(context: LayerContext, config: EncoderConfig, name: str, *, residual: bool = False) -> LayerNorm:
    return context.layer(LayerNorm)(context, name, config.hidden_size, config.norm_eps, residual=residual, bias=True)
