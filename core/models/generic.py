"""Decoders that no family here implements, run by transformers' own modelling over our paged attention.

    transformers' module ─ its attention calls the chosen implementation with q, k, v ─► ours: write_kv, paged_attention

Every token of a step is one row of a batch of 1, with its own position; the module builds no mask and keeps no cache,
and the attention that it calls sees the step's block tables. What each layer needs of the cache (heads, head size,
window, scale) is found by running the module once on tensors without memory.

It serves what is a decoder, takes its attention from transformers' interface, and rotates q and k before it calls it.
Everything else is refused. Products are torch's and not the backend's, weights are stored as they are computed with,
and ranks can't share the model: a family of its own is faster, and this says so at the start.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.backend.quant import QuantizedTensor
from octavo.core.backend.specs import AttentionSpec, CacheSpec, ScaleKind
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales
from octavo.core.load.stream import WeightTarget
from octavo.core.parallel.shard import Shard

logger = logging.getLogger(__name__)

_TRACED_TOKENS = 3


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


@dataclass(frozen=True, slots=True)
class GenericConfig:
    """Facts of a model that transformers builds.

    Attributes:
        vocab_size, hidden_size, num_layers, max_position: as for every model.
        values: config.json's content, from which the module is built again on the device.
        calls: of each layer.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    values: Mapping[str, Any] = field(hash=False)
    calls: tuple[LayerCall, ...]

    @property
    def rotary_switch_tokens(self) -> int | None:
        """Never: a module whose frequencies change with the length of a request is refused."""
        return None

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int, shard: Shard | None = None) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        if shard is not None and not shard.is_whole:
            raise ConfigError(
                "tensor_parallel_size must be 1 for a model that transformers' own modelling runs",
                field="tensor_parallel_size",
            )
        return tuple(
            KVCacheSpec(call.num_kv_heads, call.head_dim, call.v_head_dim, kv_dtype, block_size, call.window)
            for call in self.calls
        )


def is_known(architecture: str) -> bool:
    """Whether transformers is installed and has a causal language model of this name."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return False
    is_text_only = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    return is_text_only and architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def read_generic(values: Mapping[str, Any]) -> GenericConfig:
    """Facts of a model, from one run of its module on tensors without memory.

    Raises:
        CheckpointError: transformers can't build it, or it does not call its attention as a decoder does.
    """
    name = values["architectures"][0]
    trace = _Trace()
    with _Registered(trace) as implementation, torch.device("meta"):
        module = _build(values, implementation, torch.float32)
        _checkpoint_names(module, name)
        config = module.config.get_text_config()
        if _rope_types(getattr(config, "rope_parameters", None) or {}) & {"dynamic", "longrope"}:
            raise _refused(name, "its rotary frequencies change with the length of a request")
        ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.int64)
        try:
            module(input_ids=ids, position_ids=torch.arange(_TRACED_TOKENS)[None], use_cache=False)
        except Exception as error:
            raise _refused(name, f"its module fails on a plain step: {type(error).__name__}: {error}") from error
    if sorted(trace.calls) != list(range(config.num_hidden_layers)):
        raise _refused(name, "not every layer of it calls transformers' attention interface exactly as decoders do")
    rope = getattr(config, "rope_parameters", None) or {}
    if {"dynamic", "longrope"} & {
        rope.get("rope_type"),
        *(r.get("rope_type") for r in rope.values() if type(r) is dict),
    }:
        raise _refused(name, "its rotary frequencies change with the length of a request")
    max_position = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_position, int):
        raise _refused(name, "its config has no max_position_embeddings")
    logger.warning(
        "%s is not implemented natively; transformers' own modelling runs it over paged attention (slower)", name
    )
    return GenericConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        max_position=max_position,
        values=values,
        calls=tuple(trace.calls[layer] for layer in range(config.num_hidden_layers)),
    )


class GenericModel:
    """A module of transformers whose attention is ours. Implements `base.Model`.

    Args:
        config: from `read_generic`.
        context: what layers are built from.
        kv_dtype, block_size: of the KV cache.
    """

    workspace_bytes = 0

    def __init__(self, config: GenericConfig, context: LayerContext, kv_dtype: torch.dtype, block_size: int) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position = config.max_position
        self._context = context
        self._kv_specs = config.kv_specs(kv_dtype, block_size, context.shard)
        self._kv_scales = [
            KVScales.of_layer(context, spec, (0, spec.num_kv_heads), spec.num_kv_heads, None) for spec in self._kv_specs
        ]
        self._attention = _PagedAttention(config.calls)
        registered = _Registered(self._attention)
        self._module = _build(config.values, registered.name, context.activation_dtype).to(context.backend.device)
        weakref.finalize(self, registered.forget)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        return self._kv_specs

    def kv_scales(self) -> Sequence[KVScales | None]:
        """One per layer."""
        return self._kv_scales

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Every parameter of the module under the name that checkpoints give it; one that is tied counts once."""
        del norm_weights_include_one  # of GGUF files, which name an architecture that is native

        def place(parameter: torch.nn.Parameter, name: str, stored: torch.Tensor | QuantizedTensor) -> None:
            plain = self._context.formats.linear([name]).as_plain().part(name, stored)
            assert isinstance(plain, torch.Tensor)
            with torch.no_grad():
                parameter.copy_(plain)

        stored = _checkpoint_names(self._module, self.config.values["architectures"][0])
        return {
            stored[name]: WeightTarget(
                tuple(parameter.shape), partial(place, parameter, stored[name].removesuffix(".weight"))
            )
            for name, parameter in self._module.named_parameters()
        }

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        """Give each layer its cache and bind its ops."""
        self._attention.bind(self._context, caches, group_of_layer, self._kv_scales)

    def forward(self, buffers: StepBuffers) -> None:
        """One step over the batch; see `base.Model.forward`."""
        self._attention.buffers = buffers
        try:
            with torch.inference_mode():
                output = self._module(
                    input_ids=buffers.token_ids_T[None],
                    position_ids=buffers.positions_T[None],
                    use_cache=False,
                    logits_to_keep=buffers.logit_rows_R,
                )
        finally:
            self._attention.buffers = None
        if len(buffers.logit_rows_R):
            buffers.logits_RV.copy_(output.logits[0])


class _Trace:
    """Attention that only notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
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


class _PagedAttention:
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
            spec = cache.spec
            keywords = {} if own is None or spec.dtype.itemsize > 1 else own.keywords()
            kv_scale: ScaleKind = "head" if keywords else "none"
            write = CacheSpec(
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.v_head_dim,
                x_dtype=dtype,
                kv_dtype=spec.dtype,
                block_size=spec.block_size,
                layout=cache.layout,
                kv_scale=kv_scale,
            )
            attend = AttentionSpec(
                num_heads=call.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                v_head_dim=spec.v_head_dim,
                q_dtype=dtype,
                kv_dtype=spec.dtype,
                block_size=spec.block_size,
                layout=cache.layout,
                window=spec.window,
                softcap=call.softcap is not None,
                sinks=call.has_sinks,
                kv_scale=kv_scale,
            )
            write_kv = partial(context.opset.bind("write_kv", write), **keywords)
            paged_attention = partial(context.opset.bind("paged_attention", attend), **keywords)
            self._layers.append((cache, group, write_kv, paged_attention))

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, **kwargs: Any
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


class _Registered:
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


def _build(values: Mapping[str, Any], implementation: str, dtype: torch.dtype) -> Any:
    """The module, uninitialised, with attention under that name."""
    import transformers
    from transformers.initialization import no_init_weights

    name = values["architectures"][0]
    try:
        with no_init_weights():
            config = transformers.AutoConfig.for_model(values["model_type"], **_without(values, "model_type"))
            config._attn_implementation = implementation
            config._experts_implementation = "eager"
            module = getattr(transformers, name)(config)
            module.tie_weights()
        return module.to(dtype).eval()
    except Exception as error:
        raise _refused(name, f"transformers can't build it: {type(error).__name__}: {error}") from error


def _rope_types(parameters: Mapping[str, Any]) -> set[Any]:
    """The schemes of rotary positions in a config, whether for all layers or by kind of layer."""
    return {parameters.get("rope_type"), *(p.get("rope_type") for p in parameters.values() if isinstance(p, dict))}


def _checkpoint_names(module: Any, architecture: str) -> dict[str, str]:
    """What each parameter is called in checkpoints, which may differ from the module's own name for it.

    Raises:
        CheckpointError: transformers makes a parameter of several tensors while it loads, as it does with experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Renaming hands on the very same tensors; by that they are known again.
    holders = {name: torch.empty(parameter.shape, device="meta") for name, parameter in module.named_parameters()}
    own_names = {id(holder): name for name, holder in holders.items()}
    stored = {own_names.get(id(holder)): name for name, holder in revert_weight_conversion(module, holders).items()}
    if set(stored) != set(holders):
        raise _refused(architecture, "its checkpoints' tensors are rearranged while they are loaded")
    return {str(own): name for own, name in stored.items()}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def _refused(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: architecture {name} is not implemented, and transformers' own modelling can't serve it here: "
        f"{reason}",
        field="architectures",
    )
