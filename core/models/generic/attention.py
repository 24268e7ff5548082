"""Attention as transformers' modules call it, in two forms: one that notes what is asked, one over the paged cache.

    attention(module, q, k, v, attention_mask, scaling=, sliding_window=, softcap=, s_aux=, …) -> (out, weights)

Heads come before tokens, and there is one batch. What a module asks for beyond `KNOWN` is refused, since it may change
the mathematics; so is a mask of its own making, and attention that is not causal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache
from octavo.core.backend.specs import ScaleKind
from octavo.core.layers.cache_specs import attention_spec, cache_spec
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales

HONOURED = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "is_causal"})
"""Arguments that we follow."""

INERT = frozenset(
    {
        "dropout",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "past_key_values",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
    }
)
"""Arguments that say nothing of what attention computes here."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """What a layer asks of attention: sizes, and the arguments that are the same in every call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


class Trace:
    """Attention that only notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        _check_asked(module, attention_mask, kwargs)
        window = kwargs.get("sliding_window") or None
        call = LayerCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[3],
            v_head_dim=value.shape[3],
            scale=float(kwargs.get("scaling") or query.shape[3] ** -0.5),
            window=window,
            softcap=kwargs.get("softcap"),
            has_sinks=kwargs.get("s_aux") is not None,
        )
        if module.layer_idx in self.calls or query.shape[2] != key.shape[2]:
            raise ValueError(f"layer {module.layer_idx} attends twice, or to other tokens than its own")
        self.calls[module.layer_idx] = call
        return query.new_empty(1, query.shape[2], call.num_heads, call.v_head_dim), None


def _check_asked(module: Any, attention_mask: Any, asked: dict[str, Any]) -> None:
    """Raise ValueError for what we would not compute as asked."""
    if attention_mask is not None:
        raise ValueError("it makes a mask of its own")
    is_causal = asked.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError("its attention is not causal")
    unknown = sorted(name for name in set(asked) - HONOURED - INERT if asked[name] is not None)
    if unknown:
        raise ValueError(f"it passes {', '.join(unknown)} to attention")


class PagedAttention:
    """Attention of a module's layers over the step's paged cache."""

    def __init__(self, calls: Sequence[LayerCall]) -> None:
        self.buffers: StepBuffers | None = None
        self._calls = calls
        self._layers: list[tuple[KVCache, int, Any, Any]] = []

    def bind(
        self,
        context: LayerContext,
        caches: Sequence[KVCache],
        groups: Sequence[int],
        scales: Sequence[KVScales | None],
    ) -> None:
        """Bind each layer's ops for its cache's layout and scales, in place of what was bound before."""
        dtype = context.activation_dtype
        self._layers.clear()
        for call, cache, group, own in zip(self._calls, caches, groups, scales, strict=True):
            keywords = {} if own is None or cache.spec.dtype.itemsize > 1 else own.keywords()
            kv_scale: ScaleKind = "head" if keywords else "none"
            write = cache_spec(cache, dtype, kv_scale=kv_scale)
            attend = attention_spec(
                cache,
                call.num_heads,
                dtype,
                softcap=call.softcap is not None,
                sinks=call.has_sinks,
                kv_scale=kv_scale,
            )
            write_kv = partial(context.opset.bind("write_kv", write), **keywords)
            paged_attention = partial(context.opset.bind("paged_attention", attend), **keywords)
            self._layers.append((cache, group, write_kv, paged_attention))

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention as transformers calls it: heads before tokens, one batch."""
        assert self.buffers is not None
        call = self._calls[module.layer_idx]
        cache, group, write_kv, paged_attention = self._layers[module.layer_idx]
        plan = self.buffers.plans[group]
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        write_kv(k_TKD, v_TKD, cache, plan.meta.slot_mapping)
        out_THD = q_THD.new_empty(len(q_THD), call.num_heads, call.v_head_dim)
        sinks = kwargs.get("s_aux")
        paged_attention(
            q_THD,
            cache,
            plan,
            out=out_THD,
            softmax_scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks_H=None if sinks is None else sinks.to(torch.float32),
        )
        return out_THD[None], None


class Registered:
    """An attention function under a name of its own in transformers' table, which is one for the whole process."""

    _counter = itertools.count()

    def __init__(self, function: Any) -> None:
        from transformers import AttentionInterface

        self.name = f"octavo_{next(self._counter)}"
        AttentionInterface.register(self.name, function)

    def forget(self) -> None:
        """Take the name out of the table."""
        from transformers import AttentionInterface

        AttentionInterface._global_mapping.pop(self.name, None)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *_: object) -> None:
        self.forget()
