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
from octavo.core.base.errors import ConfigError
from octavo.core.layers.context import LayerContext
from octavo.core.layers.kv_scales import KVScales
from octavo.core.load.stream import WeightTarget
from octavo.core.models.generic.attention import LayerCall, PagedAttention, Registered, Trace
from octavo.core.models.generic.module import (
    build_module,
    checkpoint_names,
    refused,
    rope_types,
    tensors_of,
)
from octavo.core.parallel.shard import Shard

logger = logging.getLogger(__name__)

_TRACED_TOKENS = 3


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
    trace = Trace()
    with Registered(trace) as implementation, torch.device("meta"):
        module = build_module(values, implementation, torch.float32)
        checkpoint_names(module, name)
        config = module.config.get_text_config()
        if rope_types(getattr(config, "rope_parameters", None) or {}) & {"dynamic", "longrope"}:
            raise refused(name, "its rotary frequencies change with the length of a request")
        ids = torch.zeros(1, _TRACED_TOKENS, dtype=torch.int64)
        try:
            module(input_ids=ids, position_ids=torch.arange(_TRACED_TOKENS)[None], use_cache=False)
        except Exception as error:
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise refused(name, f"its module fails on a plain step: {cause[:200]}") from error
    if sorted(trace.calls) != list(range(config.num_hidden_layers)):
        raise refused(name, "not every layer of it calls transformers' attention interface exactly as decoders do")
    max_position = getattr(config, "max_position_embeddings", None)
    if not isinstance(max_position, int):
        raise refused(name, "its config has no max_position_embeddings")
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
        self._attention = PagedAttention(config.calls)
        registered = Registered(self._attention)
        self._module = build_module(config.values, registered.name, context.activation_dtype).to(context.backend.device)
        weakref.finalize(self, registered.forget)

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One spec per layer."""
        return self._kv_specs

    def kv_scales(self) -> Sequence[KVScales | None]:
        """One per layer."""
        return self._kv_scales

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Every tensor of the module under the name that checkpoints give it; buffers may be left out of them."""
        del norm_weights_include_one  # of GGUF files, which name an architecture that is native

        def place(into: torch.Tensor, name: str, stored: torch.Tensor | QuantizedTensor) -> None:
            plain = self._context.formats.linear([name]).as_plain().part(name, stored)
            assert isinstance(plain, torch.Tensor)
            with torch.no_grad():
                into.copy_(plain)

        stored = checkpoint_names(self._module, self.config.values["architectures"][0])
        parameters = dict(self._module.named_parameters())
        return {
            stored[name]: WeightTarget(
                tuple(tensor.shape),
                partial(place, tensor, stored[name].removesuffix(".weight")),
                required=name in parameters,
            )
            for name, tensor in tensors_of(self._module).items()
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
