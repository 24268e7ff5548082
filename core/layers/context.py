"""What every layer of one model is built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.layers.workspace import Workspace

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
    """

    backend: DeviceBackend
    opset: OpSet
    dtype: torch.dtype
    activation_dtype: torch.dtype
    workspace: Workspace
    max_model_len: int
    overrides: Mapping[str, type] = field(default_factory=dict)

    def layer(self, core: type[Layer]) -> type[Layer]:
        """The class to build where the core's would be: the backend's replacement, or the core's own."""
        return self.overrides.get(core.__name__, core)
