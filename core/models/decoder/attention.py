"""Grouped-query attention as a layer's mixer: products around `layers.Attention`.

    x ─ qkv ─ (q/k norm) ─ rope+write ─ attention ─► step.mixed_TN          ─ o ─► out

The product that ends the branch is a call of its own, since in the last layer it runs on fewer rows.

Shape letters: T tokens, M hidden, H query heads, K KV heads, D head dim, N columns of a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import StepPlan
from octavo.core.layers.attention import Attention
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales
from octavo.core.layers.linear import Linear, Part
from octavo.core.layers.norm import LayerNorm, Norm, RMSNorm, WidthNorm
from octavo.core.layers.rope import RotaryTables
from octavo.core.load.stream import WeightTarget
from octavo.core.models.activations import Activations
from octavo.core.models.decoder.config import DecoderConfig
from octavo.core.parallel.mesh import Range


class SelfAttention:
    """A layer's attention.

    Args:
        context, config: the model's.
        index: of the layer.
        tables: rotary tables, shared by the model's layers.
        kv_spec: of the layer's cache, on this rank.
        residual: the last product adds the residual stream.
    """

    def __init__(
        self,
        context: LayerContext,
        config: DecoderConfig,
        index: int,
        tables: RotaryTables,
        kv_spec: KVCacheSpec,
        *,
        residual: bool,
    ) -> None:
        self._heads = context.shard.split(config.num_heads, "num_attention_heads")
        self._kv_heads = context.shard.kv_heads(config.num_kv_heads)
        self._backend = context.backend
        prefix = config.names.layer.format(index)
        self._build_products(context, config, prefix, residual)
        rope = config.ropes[index]
        # Unit norms stand before the rotation, which changes no length, and only where there is one.
        has_norms = config.qk_norm != "unit" or rope is not None
        self._norms = _qk_norms(context, config, prefix, self._heads, self._kv_heads) if has_norms else ()
        self._sinks_name = f"{prefix}.{config.names.sinks}"
        self._num_heads = config.num_heads
        self._sinks_H = self._backend.empty(self._local[0], dtype=torch.float32) if config.sinks else None
        self._head_dim = config.head_dim
        product = f"{prefix}.{config.names.qkv or config.names.k}"
        self.kv_scales = KVScales.of_layer(
            context, kv_spec, self._kv_heads, config.num_kv_heads, product.rpartition(".")[0]
        )
        self.attention = context.layer(Attention)(
            context,
            self._local[0],
            kv_spec,
            None if rope is None else tables.get(rope),
            softmax_scale=config.softmax_scale,
            interleaved=config.interleaved_rope,
            softcap=config.score_softcap,
            sinks_H=self._sinks_H,
            scales=self.kv_scales,
        )

    @staticmethod
    def mixed_size(context: LayerContext, config: DecoderConfig) -> int:
        """Columns of step.mixed_TN."""
        start, stop = context.shard.split(config.num_heads, "num_attention_heads")
        return (stop - start) * config.head_dim

    def mix(self, x_TM: torch.Tensor, step: Activations, positions_T: torch.Tensor, plans: Sequence[StepPlan]) -> None:
        """Write the tokens' K and V and fill step.mixed_TN."""
        qkv_TN = self._qkv_TN[: len(x_TM)]
        self._qkv(x_TM, out=qkv_TN, adapter_T=step.adapter_T)
        heads, kv_heads = self._local
        q_THD, k_TKD, v_TKD = qkv_TN.unflatten(1, (-1, self._head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        if self._norms:
            q_norm, k_norm = self._norms
            q_norm(q_THD, out=q_THD)
            k_norm(k_TKD, out=k_TKD)
        out_THD = step.mixed_TN.unflatten(1, (heads, self._head_dim))
        self.attention(q_THD, k_TKD, v_TKD, positions_T, plans, out=out_THD)

    def project(self, step: Activations, *, out: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """out [T, M] = the branch that ends with step.mixed_TN."""
        self._o(step.mixed_TN, out=out, residual=residual, adapter_T=step.adapter_T)

    def bind_kv(self, cache: KVCache, group: int) -> None:
        """Take the layer's cache and its group's index."""
        self.attention.bind_kv(cache, group)

    def targets(self, *, norm_weights_include_one: bool) -> dict[str, WeightTarget]:
        """The checkpoint tensors that fill it."""
        targets = self._qkv.targets() | self._o.targets()
        for norm in self._norms:
            targets |= norm.targets(weights_include_one=norm_weights_include_one)
        if self._sinks_H is not None:
            targets[self._sinks_name] = WeightTarget((self._num_heads,), self._place_sinks)
        return targets if self.kv_scales is None else targets | self.kv_scales.targets()

    def _place_sinks(self, sinks_H: torch.Tensor) -> None:
        self._backend.from_host(sinks_H[slice(*self._heads)].to(torch.float32), out=self._sinks_H)

    def _build_products(self, context: LayerContext, config: DecoderConfig, prefix: str, residual: bool) -> None:
        dim, names = config.head_dim, config.names
        kept_q, kept_kv = _rows(self._heads, dim), _rows(self._kv_heads, dim)
        self._local = (self._heads[1] - self._heads[0], self._kv_heads[1] - self._kv_heads[0])
        query, key = config.num_heads * dim, config.num_kv_heads * dim
        if names.qkv is None:
            parts = [
                Part(f"{prefix}.{names.q}", query, (kept_q,)),
                Part(f"{prefix}.{names.k}", key, (kept_kv,)),
                Part(f"{prefix}.{names.v}", key, (kept_kv,)),
            ]
        else:
            kept = (kept_q, _shifted(kept_kv, query), _shifted(kept_kv, query + key))
            parts = [Part(f"{prefix}.{names.qkv}", query + 2 * key, kept)]
        rows = sum(part.kept_rows for part in parts)
        self._qkv_TN = context.workspace.claim(f"qkv_{rows}", rows, dtype=context.activation_dtype)
        self._qkv = context.layer(Linear)(context, parts, config.hidden_size, bias=config.qkv_bias)
        self._o = context.layer(Linear)(
            context,
            [Part(f"{prefix}.{names.o}", config.hidden_size)],
            query,
            bias=config.out_bias,
            residual=residual,
            columns=kept_q,
        )


def _qk_norms(
    context: LayerContext, config: DecoderConfig, prefix: str, heads: Range, kv_heads: Range
) -> tuple[Norm, ...]:
    """The norms of q and k; none where the family has none."""
    kind, eps, dim = config.qk_norm, config.norm_eps, config.head_dim
    sides = (
        (f"{prefix}.{config.names.q_norm}", config.num_heads, heads),
        (f"{prefix}.{config.names.k_norm}", config.num_kv_heads, kv_heads),
    )
    if kind is None:
        return ()
    if kind == "width":
        return tuple(WidthNorm(context, name, count, kept, dim, eps) for name, count, kept in sides)
    if kind in ("own", "own_layers"):
        return tuple(
            LayerNorm(context, name, dim, eps, heads=(count, kept), head_names=kind == "own_layers")
            for name, count, kept in sides
        )
    if config.norm == "layer":
        return tuple(LayerNorm(context, name, dim, eps, bias=config.norm_bias) for name, _, _ in sides)
    return tuple(
        context.layer(RMSNorm)(
            context, None if kind == "unit" else name, dim, eps, plus_one=config.norm == "rms_plus_one"
        )
        for name, _, _ in sides
    )


def _rows(heads: Range, head_dim: int) -> Range:
    return heads[0] * head_dim, heads[1] * head_dim


def _shifted(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by
