"""Attention over the paged cache: rotate, write this step's K and V, attend.

The ops depend on the cache's layout, which the backend states when it allocates; so a layer binds them in `bind_kv`,
once, before the first step. The layer never sees block tables or slots: they are in its group's plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.specs import ScaleKind
from octavo.core.layers.cache_specs import attention_spec, cache_spec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales


class Attention:
    """Causal attention with rotary positions and grouped queries.

    Args:
        context: the model's.
        num_heads: H on this rank; the spec's num_kv_heads divides it.
        kv_spec: of the layer's cache; its window is the attention's.
        cos_sin_PR: the rotary table, rotating the first R elements of a head; None: the layer has no positions.
        softmax_scale: multiplies the scores.
        interleaved: rotary pairs are neighbours.
        softcap: c of c·tanh(score / c); None leaves scores alone.
        sinks_H: fp32, a logit of each head that only the denominator sees; None has none.
        alibi_slopes_H: fp32, added to scores times the distance; None has none.
        scales: of a cache that keeps a byte per element; None: it keeps values as they are.
    """

    def __init__(
        self,
        context: LayerContext,
        num_heads: int,
        kv_spec: KVCacheSpec,
        cos_sin_PR: torch.Tensor | None,
        *,
        softmax_scale: float,
        interleaved: bool = False,
        softcap: float | None = None,
        sinks_H: torch.Tensor | None = None,
        alibi_slopes_H: torch.Tensor | None = None,
        scales: KVScales | None = None,
    ) -> None:
        self.scales = scales
        self.kv_spec = kv_spec
        self._context = context
        self._num_heads = num_heads
        self._cos_sin_PR = cos_sin_PR
        self._softmax_scale = softmax_scale
        self._interleaved = interleaved
        self._softcap = softcap
        self._sinks_H = sinks_H
        self._alibi_slopes_H = alibi_slopes_H
        self._kv: KVCache
        self._group: int
        self._kv_scales: dict[str, torch.Tensor] = {}

    def bind_kv(self, kv: KVCache, group: int) -> None:
        """Take the layer's cache and its group's index, and bind the ops for its layout and its scales.

        It may be bound anew: for the calibration of scales (engine/kv_calibration.py) it has another cache before.
        """
        spec, dtype = kv.spec, self._context.activation_dtype
        self._kv = kv
        self._group = group
        self._kv_scales = {} if self.scales is None or spec.dtype.itemsize > 1 else self.scales.keywords()
        kv_scale: ScaleKind = "head" if self._kv_scales else "none"
        rotary_dim = 0 if self._cos_sin_PR is None else self._cos_sin_PR.shape[1]
        self._write = self._context.bind(
            Attention,
            self,
            "rope_write_kv" if rotary_dim else "write_kv",
            cache_spec(
                kv,
                dtype,
                kv_scale=kv_scale,
                num_heads=self._num_heads if rotary_dim else 0,
                rotary_dim=rotary_dim,
                interleaved=self._interleaved and rotary_dim > 0,
            ),
        )
        self._paged_attention = self._context.bind(
            Attention,
            self,
            "paged_attention",
            attention_spec(
                kv,
                self._num_heads,
                dtype,
                softcap=self._softcap is not None,
                sinks=self._sinks_H is not None,
                alibi=self._alibi_slopes_H is not None,
                kv_scale=kv_scale,
            ),
        )

    def __call__(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        plans: Sequence[StepPlan],
        *,
        out: torch.Tensor,
    ) -> None:
        """out [T, H, Dv] = attention of this step's tokens over their requests' cache. Rotates q in place."""
        plan = plans[self._group]
        if self._cos_sin_PR is None:
            self._write(k_TKD, v_TKD, self._kv, plan.meta.slot_mapping, **self._kv_scales)
        else:
            self._write(
                q_THD,
                k_TKD,
                v_TKD,
                positions_T,
                self._cos_sin_PR,
                self._kv,
                plan.meta.slot_mapping,
                out_q=q_THD,
                interleaved=self._interleaved,
                **self._kv_scales,
            )
        self._paged_attention(
            q_THD,
            self._kv,
            plan,
            out=out,
            softmax_scale=self._softmax_scale,
            window=self.kv_spec.window,
            softcap=self._softcap,
            sinks_H=self._sinks_H,
            alibi_slopes_H=self._alibi_slopes_H,
            **self._kv_scales,
        )
