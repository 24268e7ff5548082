"""A decoder: embedding, layers, norm and head, built from a `DecoderConfig`. Implements `base.Model`.

    token ids ─ embedding ─ layer 0 ─ … ─ layer N-1 (mixer: all rows; the rest: wanted rows) ─ norm ─ head ─ logits

After the last layer's mixer only rows whose output is wanted go on. A model without a head gives the normed rows
themselves, for whoever pools them.

Shape letters: T tokens, R rows whose output is wanted, M hidden, V width of the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.embedding import Embedding, OutputHead
from octavo.core.layers.kv_scales import KVScales
from octavo.core.layers.rope import RotaryTables
from octavo.core.load.stream import WeightTarget
from octavo.core.models.activations import Activations
from octavo.core.models.decoder.attention import SelfAttention
from octavo.core.models.decoder.blocks import BLOCKS, build_norm
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.decoder.mla import LatentAttention


class DecoderModel:
    """A decoder on one rank.

    Args:
        config: from the family's reader.
        context: what layers are built from.
        kv_dtype, block_size: of the KV cache.
        has_head: False: the output is the normed hidden state.
    """

    def __init__(
        self,
        config: DecoderConfig,
        context: LayerContext,
        kv_dtype: torch.dtype,
        block_size: int,
        *,
        has_head: bool = True,
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size if has_head else config.hidden_size
        self.max_position = config.max_position
        self._workspace = context.workspace
        self._kv_specs = config.kv_specs(kv_dtype, block_size, context.shard)
        mixer = SelfAttention if config.mla is None else LatentAttention
        self._activations = Activations.claim(
            context, hidden_size=config.hidden_size, mixed_size=mixer.mixed_size(context, config)
        )
        self._embed = context.layer(Embedding)(
            context,
            config.names.embedding,
            config.vocab_size,
            config.hidden_size,
            scale=config.embedding_scale,
            tied=config.tied,
        )
        tables = RotaryTables(context, config.rotary_switch_tokens)
        block = BLOCKS[config.order]
        self._layers = [block(context, config, index, tables, spec) for index, spec in enumerate(self._kv_specs)]
        self._norm = build_norm(context, config, config.names.final_norm, residual=self._has_pending)
        self._head = None
        if has_head:
            self._head = context.layer(OutputHead)(
                context,
                config.names.head,
                self._embed,
                softcap=config.logit_softcap,
                scale=config.logit_scale,
                bias=config.head_bias,
            )

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the activation buffers."""
        return self._workspace.nbytes

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        return self._kv_specs

    def kv_scales(self) -> Sequence[KVScales | None]:
        """One per layer."""
        return [layer.kv_scales for layer in self._layers]

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Where each tensor of the checkpoint goes; the embedding comes before a head that may be tied to it."""
        targets = self._embed.targets()
        for layer in self._layers:
            targets |= layer.targets(norm_weights_include_one=norm_weights_include_one)
        targets |= self._norm.targets(weights_include_one=norm_weights_include_one)
        return targets if self._head is None else targets | self._head.targets()

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        """Give each layer its cache and its group's index."""
        for layer, cache, group in zip(self._layers, caches, group_of_layer, strict=True):
            layer.bind_kv(cache, group)

    def forward(self, buffers: StepBuffers) -> None:
        """One step over the batch; see `base.Model.forward`."""
        step = self._activations.first(buffers.token_ids_T.shape[0], buffers.adapter_T)
        self._embed(buffers.token_ids_T, out=step.hidden_TM, adapter_T=buffers.adapter_T)
        for layer in self._layers[:-1]:
            layer.attend(step, buffers.positions_T, buffers.plans)
            layer.feed_forward(step)
        last = self._layers[-1]
        last.attend(step, buffers.positions_T, buffers.plans)
        if buffers.logit_rows_R.shape[0]:
            rows = step.take(buffers.logit_rows_R)
            last.feed_forward(rows)
            self._finish(rows, buffers.logits_RV)

    @property
    def _has_pending(self) -> bool:
        """Whether the last layer leaves a branch for the last norm to add."""
        return self.config.order == "sandwich"

    def _finish(self, rows: Activations, out_RV: torch.Tensor) -> None:
        """The output of the wanted rows: their last norm, and the head's product."""
        if self._has_pending:
            self._norm(rows.branch_TM, out=rows.branch_TM, residual=rows.hidden_TM)
        else:
            self._norm(rows.hidden_TM, out=rows.branch_TM)
        if self._head is None:
            out_RV.copy_(rows.branch_TM)
        else:
            self._head(rows.branch_TM, out=out_RV, adapter_R=rows.adapter_T)
