"""A module of transformers, built from a config: uninitialised, and with what its tensors are called in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from octavo.core.base.errors import CheckpointError


def build_module(values: Mapping[str, Any], implementation: str, dtype: torch.dtype) -> Any:
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
        raise refused(name, f"transformers can't build it: {type(error).__name__}: {error}") from error


def rope_types(parameters: Mapping[str, Any]) -> set[Any]:
    """The schemes of rotary positions in a config, whether for all layers or by kind of layer."""
    return {parameters.get("rope_type"), *(p.get("rope_type") for p in parameters.values() if isinstance(p, dict))}


def tensors_of(module: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint of the module holds: parameters, each once however often it is tied, and lasting buffers."""
    lasting = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in lasting}
    return dict(module.named_parameters()) | buffers


def checkpoint_names(module: Any, architecture: str) -> dict[str, str]:
    """What each tensor of the module is called in checkpoints, which may differ from the module's own name for it.

    Raises:
        CheckpointError: transformers makes a tensor of several tensors while it loads, as it does with experts.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # Renaming hands on the very same tensors; by that they are known again.
    holders = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors_of(module).items()}
    own_names = {id(holder): name for name, holder in holders.items()}
    stored = {own_names.get(id(holder)): name for name, holder in revert_weight_conversion(module, holders).items()}
    if set(stored) != set(holders):
        raise refused(architecture, "its checkpoints' tensors are rearranged while they are loaded")
    return {str(own): name for own, name in stored.items()}


def _without(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def refused(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"config.json: architecture {name} is not implemented, and transformers' own modelling can't serve it here: "
        f"{reason}",
        field="architectures",
    )
