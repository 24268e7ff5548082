"""The orders in which published decoders put norms and additions around a layer's two branches.

    pre        h += mixer(norm(h));  h += channel(norm(h))                                        llama and most others
    sandwich   h += norm(mixer(norm(h)));  h += norm(channel(norm(h)))                            gemma 2 and 3, glm4
    post       h += norm(mixer(h));  h += norm(channel(h))                                        olmo2
    parallel   h += mixer(norm(h)) + channel(norm(h))                                             phi, cohere

`attend` runs a layer up to the mixer's result in step.mixed_TN; `feed_forward` does the rest, in the last layer only
for the rows whose logits are wanted. Where nothing stands between a branch's product and the addition, the product
adds the residual stream itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import StepPlan
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales
from octavo.core.layers.norm import LayerNorm, Norm, RMSNorm
from octavo.core.layers.rope import RotaryTables
from octavo.core.load.stream import WeightTarget
from octavo.core.models.activations import Activations
from octavo.core.models.decoder.attention import SelfAttention
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.models.decoder.feed_forward import FeedForward
from octavo.core.models.decoder.mla import LatentAttention
from octavo.core.models.decoder.moe import MixtureOfExperts


class Block(Protocol):
    """One layer of a decoder, as the model runs it."""

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.mixed_TN."""

    def feed_forward(self, step: Activations) -> None:
        """Everything after the mixer, on the rows of `step`."""

    def bind_kv(self, cache: KVCache, group: int) -> None:
        """Take the layer's cache and its group's index."""

    @property
    def kv_scales(self) -> KVScales | None:
        """Of its cache."""

    def targets(self, *, norm_weights_include_one: bool) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the layer."""


class _Block:
    """What the orders share: the two branches, and the norms as the order builds them.

    Args:
        context, config: the model's.
        index: of the layer.
        tables: rotary tables, shared by the model's layers.
        kv_spec: of the layer's cache, on this rank.
    """

    adds_in_product = True
    """Whether the product that ends a branch adds the residual stream."""

    def __init__(
        self, context: LayerContext, config: DecoderConfig, index: int, tables: RotaryTables, kv_spec: KVCacheSpec
    ) -> None:
        self._adds = self.adds_in_product and config.residual_scale == 1.0
        self._residual_scale = config.residual_scale
        mixer = SelfAttention if config.mla is None else LatentAttention
        channel = MixtureOfExperts if config.has_experts(index) else FeedForward
        self.mixer = mixer(context, config, index, tables, kv_spec, residual=self._adds)
        self._channel = channel.of_layer(context, config, index, residual=self._adds)
        self._norms: list[Norm] = []
        self._context, self._config, self._index = context, config, index
        self._build_norms(config.names.layer.format(index))

    def bind_kv(self, cache: KVCache, group: int) -> None:
        """Take the layer's cache and its group's index."""
        self.mixer.bind_kv(cache, group)

    @property
    def kv_scales(self) -> KVScales | None:
        """See Block."""
        return self.mixer.kv_scales

    def targets(self, *, norm_weights_include_one: bool) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill the layer."""
        targets = self.mixer.targets(norm_weights_include_one=norm_weights_include_one)
        targets |= self._channel.targets()
        for norm in self._norms:
            targets |= norm.targets(weights_include_one=norm_weights_include_one)
        return targets

    def _build_norms(self, prefix: str) -> None:
        raise NotImplementedError

    def _norm(self, name: str, *, residual: bool = False) -> Norm:
        norm = build_norm(self._context, self._config, name, residual=residual)
        self._norms.append(norm)
        return norm

    def _mixed_into_hidden(self, step: Activations) -> None:
        """hidden += the mixer's branch."""
        if self._adds:
            self.mixer.project(step, out=step.hidden_TM, residual=step.hidden_TM)
        else:
            self.mixer.project(step, out=step.branch_TM)
            step.hidden_TM.add_(step.branch_TM, alpha=self._residual_scale)

    def _channel_into_hidden(self, step: Activations) -> None:
        """hidden += the channel's branch, which reads step.branch_TM."""
        if self._adds:
            self._channel(step.branch_TM, out=step.hidden_TM, residual=step.hidden_TM, adapter_T=step.adapter_T)
        else:
            self._channel(step.branch_TM, out=step.branch_TM, adapter_T=step.adapter_T)
            step.hidden_TM.add_(step.branch_TM, alpha=self._residual_scale)


class PreNormBlock(_Block):
    """Each branch reads the normed stream."""

    def _build_norms(self, prefix: str) -> None:
        self._input_norm = self._norm(f"{prefix}.{self._config.names.input_norm}")
        self._channel_norm = self._norm(f"{prefix}.{self._config.names.feed_forward_norm}")

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.mixed_TN."""
        self._input_norm(step.hidden_TM, out=step.branch_TM)
        self.mixer.mix(step.branch_TM, step, positions_T, plans)

    def feed_forward(self, step: Activations) -> None:
        """Add the branch that ends with step.mixed_TN, then the channel's."""
        self._mixed_into_hidden(step)
        self._channel_norm(step.hidden_TM, out=step.branch_TM)
        self._channel_into_hidden(step)


class ParallelBlock(_Block):
    """Both branches read one norm of the stream, which is not changed in between."""

    def _build_norms(self, prefix: str) -> None:
        self._input_norm = self._norm(f"{prefix}.{self._config.names.input_norm}")

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.mixed_TN."""
        self._input_norm(step.hidden_TM, out=step.branch_TM)
        self.mixer.mix(step.branch_TM, step, positions_T, plans)

    def feed_forward(self, step: Activations) -> None:
        """Add both branches. The norm runs again, for the rows that go on."""
        self._input_norm(step.hidden_TM, out=step.branch_TM)
        self._channel_into_hidden(step)
        self._mixed_into_hidden(step)


class PostNormBlock(_Block):
    """Each branch reads the stream as it is, and is normed before it is added."""

    adds_in_product = False

    def _build_norms(self, prefix: str) -> None:
        names = self._config.names
        self._mixed_norm = self._norm(f"{prefix}.{names.attention_out_norm}")
        self._channel_norm = self._norm(f"{prefix}.{names.feed_forward_out_norm}")

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.mixed_TN."""
        self.mixer.mix(step.hidden_TM, step, positions_T, plans)

    def feed_forward(self, step: Activations) -> None:
        """Add the normed branches."""
        branch_TM = step.branch_TM
        self.mixer.project(step, out=branch_TM)
        self._mixed_norm(branch_TM, out=branch_TM)
        step.hidden_TM.add_(branch_TM)
        self._channel(step.hidden_TM, out=branch_TM, adapter_T=step.adapter_T)
        self._channel_norm(branch_TM, out=branch_TM)
        step.hidden_TM.add_(branch_TM)


class SandwichBlock(_Block):
    """Each branch reads the normed stream, and is normed before it is added.

    The addition is done by the next norm (residual += branch, then norm): a layer leaves its second branch pending in
    step.branch_TM, and the next layer's first norm, or the model's last one, adds it.
    """

    adds_in_product = False

    def _build_norms(self, prefix: str) -> None:
        names = self._config.names
        self._is_first = self._index == 0
        self._input_norm = self._norm(f"{prefix}.{names.input_norm}", residual=not self._is_first)
        self._mixed_norm = self._norm(f"{prefix}.{names.attention_out_norm}")
        self._channel_norm = self._norm(f"{prefix}.{names.feed_forward_norm}", residual=True)
        self._channel_out_norm = self._norm(f"{prefix}.{names.feed_forward_out_norm}")

    def attend(self, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Add the pending branch to step.hidden_TM, write K and V, and fill step.mixed_TN."""
        if self._is_first:
            self._input_norm(step.hidden_TM, out=step.branch_TM)
        else:
            self._input_norm(step.branch_TM, out=step.branch_TM, residual=step.hidden_TM)
        self.mixer.mix(step.branch_TM, step, positions_T, plans)

    def feed_forward(self, step: Activations) -> None:
        """Add the mixer's branch to step.hidden_TM; leave the channel's pending."""
        branch_TM = step.branch_TM
        self.mixer.project(step, out=branch_TM)
        self._mixed_norm(branch_TM, out=branch_TM)
        self._channel_norm(branch_TM, out=branch_TM, residual=step.hidden_TM)
        self._channel(branch_TM, out=branch_TM, adapter_T=step.adapter_T)
        self._channel_out_norm(branch_TM, out=branch_TM)


BLOCKS: dict[str, type[PreNormBlock | SandwichBlock | PostNormBlock | ParallelBlock]] = {
    "pre": PreNormBlock,
    "sandwich": SandwichBlock,
    "post": PostNormBlock,
    "parallel": ParallelBlock,
}
"""`DecoderConfig.order` to the block that follows it. Never written to."""


def build_norm(context: LayerContext, config: DecoderConfig, name: str, *, residual: bool = False) -> Norm:
    """A norm of the residual stream, of the family's kind."""
    if config.norm == "layer":
        return LayerNorm(context, name, config.hidden_size, config.norm_eps, residual=residual, bias=config.norm_bias)
    return context.layer(RMSNorm)(
        context, name, config.hidden_size, config.norm_eps, residual=residual, plus_one=config.norm == "rms_plus_one"
    )
