"""A layer's feed-forward without experts: gated, or with an activation between two products.

    gated   x ─ [gate; up] ─ act(gate)·up ─ down ─► out          Shazeer 2020 (GLU variants)
    plain   x ─ up ─ act ─ down ─► out

Over ranks the inner width is split. Shape letters: T tokens, M hidden, I inner width on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.backend.specs import Gate, RowSpec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.linear import Linear, Part
from octavo.core.load.stream import WeightTarget
from octavo.core.models.decoder.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class FeedForwardNames:
    """Whole names of the checkpoint layers; either gate_up, or gate and up. A plain feed-forward has no gate."""

    up: str
    down: str
    gate: str | None = None
    gate_up: str | None = None


class FeedForward:
    """Two products with an activation between them.

    Args:
        context: the model's.
        names: of the checkpoint layers.
        hidden_size, intermediate_size: M, and I over all ranks.
        gate: the gated pair's activation; None: plain, with `activation`.
        bias: both products have one.
        residual: the last product adds a residual.
    """

    def __init__(
        self,
        context: LayerContext,
        names: FeedForwardNames,
        hidden_size: int,
        intermediate_size: int,
        *,
        gate: Gate | None,
        activation: str = "gelu_tanh",
        bias: bool = False,
        residual: bool = False,
    ) -> None:
        kept = context.shard.split(intermediate_size, "intermediate_size")
        inner = kept[1] - kept[0]
        if names.gate_up is not None:
            both = (kept, (intermediate_size + kept[0], intermediate_size + kept[1]))
            parts = [Part(names.gate_up, 2 * intermediate_size, both)]
        else:
            ups = [names.up] if names.gate is None else [names.gate, names.up]
            parts = [Part(name, intermediate_size, (kept,)) for name in ups]
        self._up = context.layer(Linear)(context, parts, hidden_size, bias=bias, gate=gate)
        self._down = context.layer(Linear)(
            context, [Part(names.down, hidden_size)], intermediate_size, bias=bias, residual=residual, columns=kept
        )
        self._inner_TI = context.workspace.claim(f"inner_{inner}", inner, dtype=context.activation_dtype)
        self._activation = None
        if gate is None:
            self._kind = activation
            spec = RowSpec(inner, context.activation_dtype, activation)
            self._activation = context.bind(FeedForward, self, "activation", spec)

    @classmethod
    def of_layer(cls, context: LayerContext, config: DecoderConfig, index: int, *, residual: bool) -> FeedForward:
        """The feed-forward of a decoder's layer."""
        prefix, names = config.names.layer.format(index), config.names
        return cls(
            context,
            FeedForwardNames(
                up=f"{prefix}.{names.up}",
                down=f"{prefix}.{names.down}",
                gate=None if config.gate is None else f"{prefix}.{names.gate}",
                gate_up=None if names.gate_up is None else f"{prefix}.{names.gate_up}",
            ),
            config.hidden_size,
            config.intermediate_size,
            gate=config.gate,
            activation=config.activation,
            bias=config.mlp_bias,
            residual=residual,
        )

    def __call__(
        self,
        x_TM: torch.Tensor,
        *,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
        adapter_T: torch.Tensor | None = None,
    ) -> None:
        """out [T, M] = the feed-forward of x, which out may be; `residual` when the layer was built to add one."""
        inner_TI = self._inner_TI[: len(x_TM)]
        self._up(x_TM, out=inner_TI, adapter_T=adapter_T)
        if self._activation is not None:
            self._activation(inner_TI, out=inner_TI, kind=self._kind)
        self._down(inner_TI, out=out, residual=residual, adapter_T=adapter_T)

    def targets(self) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill it."""
        return self._up.targets() | self._down.targets()
