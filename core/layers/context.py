"""What every layer of one model is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.backend.specs import GemmSpec, OpSpec
from octavo.core.layers.workspace import Workspace
from octavo.core.lora.slots import AdapterSlots
from octavo.core.parallel.shard import Shard
from octavo.core.quant.formats import PLAIN, WeightFormats

Layer = TypeVar("Layer")


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Shared by the layers of one model while they are built; nothing of it is consulted in a step.

    Attributes:
        backend: allocates parameters and buffers.
        opset: binds ops to specs and prepares weights.
        dtype: how plain weights of products are stored.
        activation_dtype: what the backend computes in for that storage dtype.
        workspace: the model's activation buffers.
        max_model_len: positions a rotary table must cover.
        overrides: the backend's replacements of layers, by the name of the core's class; see `overrides.py`.
        shard: this rank's place in the group that shares the model.
        formats: how the checkpoint stores its weights.
        expert_parallel: ranks share out whole experts, in place of a part of each.
        adapters: where layers register for low-rank adapters; None: the engine serves none.
    """

    backend: DeviceBackend
    opset: OpSet
    dtype: torch.dtype
    activation_dtype: torch.dtype
    workspace: Workspace
    max_model_len: int
    overrides: Mapping[str, type] = field(default_factory=dict)
    shard: Shard = field(default_factory=Shard.single)
    formats: WeightFormats = PLAIN
    expert_parallel: bool = False
    adapters: AdapterSlots | None = None

    def layer(self, core: type[Layer]) -> type[Layer]:
        """The class to build where the core's would be: the backend's replacement, or the core's own."""
        return self.overrides.get(core.__name__, core)

    def bind(
        self, core: type, layer: object, op: str, spec: OpSpec, *, product: GemmSpec | None = None
    ) -> Callable[..., Any]:
        """The op that `core.__call__` uses, for an instance of `core` or of its replacement.

        A replacement with a `__call__` of its own may never use the op: then the op counts only once it is called, so
        that neither a report nor --strict-backend speaks of what does not run.
        """
        is_used = type(layer).__call__ is core.__call__
        bind = self.opset.bind if is_used else self.opset.bind_when_called
        return bind(op, spec, product=product)
