"""What the engine knows of a model: its config's facts, its KV specs, its weights' places, and one forward pass.

    read_config(checkpoint.config) -> ModelConfig          facts, before anything is loaded (`octavo plan`)
    build_model(checkpoint.config, ...) -> Model           ops bound and buffers allocated; weights empty
    load_weights(checkpoint, model.weight_targets(...))    filled, tensor by tensor
    model.bind_kv(caches, group_of_layer)                  once the engine has allocated the pools
    model.forward(buffers)                                 each step; allocates nothing, waits for nothing

The engine owns the KV pools and the step's buffers; a model owns its weights and its activation workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import KVCache, KVCacheSpec
from octavo.core.layers.kv_scales import KVScales
from octavo.core.load.stream import WeightTarget
from octavo.core.parallel.shard import Shard


class ModelConfig(Protocol):
    """A family's config, read strictly: what it holds is implemented, and what it can't hold was refused."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; valid ids are below it."""

    @property
    def max_position(self) -> int:
        """Positions the checkpoint was made for, in tokens; an upper limit of max_model_len."""

    @property
    def rotary_switch_tokens(self) -> int | None:
        """Requests that may compute more tokens than this have rotary rows of their own, which begin there.

        None: the rotary frequencies of all requests are the same. See layers/rope.py.
        """

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def hidden_size(self) -> int:
        """Elements of the residual stream."""

    def kv_specs(self, kv_dtype: torch.dtype, block_size: int, shard: Shard | None = None) -> tuple[KVCacheSpec, ...]:
        """One spec per attention layer, in layer order, of what a rank holds (None: of all)."""


class Model(Protocol):
    """A model on a device."""

    @property
    def config(self) -> ModelConfig:
        """The checkpoint's facts."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def max_position(self) -> int:
        """Positions the checkpoint was made for, in tokens."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the activation buffers."""

    def kv_specs(self) -> tuple[KVCacheSpec, ...]:
        """One spec per attention layer, in layer order."""

    def kv_scales(self) -> Sequence[KVScales | None]:
        """The scales of each attention layer's cache, in layer order; None for a cache without."""

    def weight_targets(self, *, norm_weights_include_one: bool = False) -> dict[str, WeightTarget]:
        """Where each tensor of the checkpoint goes, under its Hugging Face name, in file-like order.

        Args:
            norm_weights_include_one: the checkpoint's attribute of that name.
        """

    def bind_kv(self, caches: Sequence[KVCache], group_of_layer: Sequence[int]) -> None:
        """Give each attention layer its cache and bind the ops that depend on its layout.

        Args:
            caches: one view per layer, in layer order.
            group_of_layer: the index of each layer's KV group, which is the index of its plan in a step.
        """

    def forward(self, buffers: StepBuffers) -> None:
        """One step over the batch: writes K and V of its tokens, and `logits_RV` for the rows `logit_rows_R`.

        Requires: weights loaded, `bind_kv` called, at most max_num_batched_tokens tokens, positions below
        max_model_len (above their request's rotary offset), plans made for this step.
        """
