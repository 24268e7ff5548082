"""Which family runs a checkpoint, and the two doors to it: `read_config` and `build_model`.

A family is found by the config's `architectures`, or by its `model_type` where a config names no architecture (a bare
`config.json` saved without a model). What no family implements is run by transformers' own modelling where that can be
(generic/); an architecture that nobody knows is refused with the nearest names.
The stack of a decoder alone (LlamaModel), and a classifier on it, are of the generating family: what follows the last
norm is the pooler's (core/pool), and the model is built without a head.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.layers.context import LayerContext
from octavo.core.layers.workspace import Workspace
from octavo.core.lora.slots import AdapterSlots
from octavo.core.models.base import Model, ModelConfig
from octavo.core.models.families.table import FAMILIES, Family
from octavo.core.models.generic.model import GenericModel, is_known, read_generic
from octavo.core.parallel.shard import Shard
from octavo.core.quant.formats import PLAIN, WeightFormats


def read_config(config: Mapping[str, Any]) -> ModelConfig:
    """The facts of a model from its config.json (or a GGUF file's equivalent), before anything is loaded.

    Raises:
        CheckpointError: nobody implements the architecture, or the config has a field that is missing, of the
            wrong type, or changes the mathematics in a way the family does not implement.
    """
    facts: ModelConfig = _family(config).read(config)
    return facts


def build_model(
    config: Mapping[str, Any],
    *,
    backend: DeviceBackend,
    opset: OpSet,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    block_size: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    layer_overrides: Mapping[str, type] | None = None,
    formats: WeightFormats = PLAIN,
    shard: Shard | None = None,
    expert_parallel: bool = False,
    has_head: bool = True,
    adapters: AdapterSlots | None = None,
) -> Model:
    """Build a model with its ops bound and its buffers allocated; its weights are still to be loaded.

    Args:
        config: the checkpoint's config.
        backend: where it will run.
        opset: the backend's ops with their fallbacks; told here of every spec the model needs.
        dtype: how the weights of products are stored.
        kv_dtype, block_size: of the KV cache.
        max_num_batched_tokens: the largest number of tokens in a step.
        max_model_len: the largest number of tokens of a request; at most the checkpoint's own limit.
        layer_overrides: classes that the backend's package builds in place of core layers; see layers/overrides.py.
        formats: how the checkpoint stores its weights.
        shard: this rank's place in the group that shares the model; None: it has all of it.
        expert_parallel: ranks share out whole experts, in place of a part of each.
        has_head: False: the model gives the hidden rows after its last norm.
        adapters: where its layers register for low-rank adapters; None: it runs without.

    Raises:
        CheckpointError: see `read_config`.
        ConfigError: max_model_len is beyond the checkpoint, the backend does not compute with `dtype`, or
            expert_parallel is asked of a model without experts.
    """
    family = _family(config)
    facts: ModelConfig = family.read(config)
    if max_model_len > facts.max_position:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the model was made for {facts.max_position} positions; lower it",
            field="max_model_len",
        )
    if expert_parallel and getattr(facts, "moe", None) is None:
        raise ConfigError(
            "expert_parallel is set, but the model has no experts to share out; run without it", field="expert_parallel"
        )
    activation_dtype = backend.capabilities.activation_dtype.get(dtype)
    if activation_dtype is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in backend.capabilities.activation_dtype)
        raise ConfigError(
            f"dtype is {str(dtype).removeprefix('torch.')}, which backend {backend.name} does not store; use {known}",
            field="dtype",
        )
    context = LayerContext(
        backend=backend,
        opset=opset,
        dtype=dtype,
        activation_dtype=activation_dtype,
        workspace=Workspace(backend, max_num_batched_tokens),
        max_model_len=max_model_len,
        overrides=layer_overrides or {},
        formats=formats,
        shard=shard or Shard.single(),
        expert_parallel=expert_parallel,
        adapters=adapters,
    )
    options = {} if has_head else {"has_head": False}
    return family.build(facts, context, kv_dtype, block_size, **options)


def _family(config: Mapping[str, Any]) -> Family:
    """The family of a config's architecture. Raises CheckpointError."""
    names = config.get("architectures")
    if names is None and isinstance(config.get("model_type"), str):
        for family in FAMILIES.values():
            if family.model_type == config["model_type"]:
                return family
        names = [config["model_type"]]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"config.json: architectures is {names!r}; it must name one of {', '.join(FAMILIES)}",
            field="architectures",
        )
    for name in names:
        found = FAMILIES.get(name) or FAMILIES.get(_with_head(name))
        if found is not None:
            return found
    if is_known(names[0]):
        return Family(str(config.get("model_type")), read_generic, GenericModel)
    near = difflib.get_close_matches(names[0], FAMILIES, n=3) or list(FAMILIES)
    raise CheckpointError(
        f"config.json: architecture {names[0]} is not implemented; the nearest are {', '.join(near)}",
        field="architectures",
    )


def _with_head(name: str) -> str:
    """The generating architecture with the same stack: of LlamaModel, or of LlamaForSequenceClassification."""
    for ending in ("TextForSequenceClassification", "ForSequenceClassification", "TextModel", "Model"):
        if name.endswith(ending):
            return f"{name.removesuffix(ending)}ForCausalLM"
    return name
