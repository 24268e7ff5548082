"""What every layer of one model is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.layers.workspace import Workspace


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
    """

    backend: DeviceBackend
    opset: OpSet
    dtype: torch.dtype
    activation_dtype: torch.dtype
    workspace: Workspace
    max_model_len: int
