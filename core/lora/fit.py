"""Whether an adapter fits a model, and what this rank holds of it.

    adapter.layers ──► each is a layer of the model, of its shape and kind, of a rank that fits a slot, finite
    settings       ──► each layer of the model that target_modules selects has weights
    base_weights   ──► each repeats what the model has

Only `AdapterSlots` asks. Every rank of a group checks whole matrices, so that all of them say the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.base.names import did_you_mean
from octavo.core.lora.adapter import Adapter, AdapterLayer
from octavo.core.lora.parts import LoraPart, LoraWeights
from octavo.core.lora.stacked import ExpertStack, unstacked


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint layer's adapters go.

    Attributes:
        name: of the checkpoint layer; adapters may know it by another one.
        part: that the layer is, or is a member of.
        is_here: False: another rank holds it.
        repeats: whether a tensor repeats the layer's own weight; None: it can't be asked.
    """

    name: str
    part: LoraPart
    is_here: bool = True
    repeats: Callable[[torch.Tensor], bool] | None = None


def fit_adapter(
    adapter: Adapter, places: Mapping[str, Place], stacks: Mapping[str, ExpertStack], max_rank: int
) -> dict[str, LoraWeights]:
    """Check an adapter against a model's layers; returns what this rank holds of each, on the host.

    Args:
        adapter: as read.
        places: the model's layers by checkpoint name.
        stacks: the model's experts, by the module that has their parameters.
        max_rank: of a slot.

    Raises:
        CheckpointError: naming the layer, what is wrong with it and the fix.
    """
    _check_complete(adapter, places)
    for name, weight in adapter.base_weights.items():
        repeats = places[name].repeats if name in places else None
        if repeats is None or not repeats(weight):
            raise _error(
                adapter, name, "comes with a base weight that is not this model's; merge the adapter into its model"
            )
    layers = {**adapter.layers, **unstacked(adapter, stacks)}
    fitted = {name: _fitted(adapter, name, layer, places, max_rank) for name, layer in layers.items()}
    return {places[name].name: weights for name, weights in fitted.items() if places[name].is_here}


def _fitted(
    adapter: Adapter, name: str, layer: AdapterLayer, places: Mapping[str, Place], max_rank: int
) -> LoraWeights:
    if name not in places:
        raise _error(adapter, name, f"is none that this model can adapt{did_you_mean(name, places)}")
    part, weights = places[name].part, layer.weights
    shape = part.shape
    if layer.is_embedding != (shape.kind == "embedding"):
        raise _error(adapter, name, "is an embedding in one of adapter and model, and a product in the other")
    expected, found = (shape.rows, shape.in_features), (weights.b_NR.shape[0], weights.a_RK.shape[1])
    if expected != found:
        raise _error(
            adapter, name, f"is [{found[0]}, {found[1]}] in the adapter and [{expected[0]}, {expected[1]}] in the model"
        )
    if weights.rank > max_rank:
        raise _error(adapter, name, f"has rank {weights.rank}, above max_lora_rank {max_rank}; raise it")
    for letter, tensor in (("A", weights.a_RK), ("B", weights.b_NR)):
        if not bool(tensor.to(part.dtype).isfinite().all()):
            dtype = str(part.dtype).removeprefix("torch.")
            raise _error(adapter, name, f"holds values in {letter} that are NaN or infinite as {dtype}; train it again")
    return shape.cut(weights, part.dtype)


def _check_complete(adapter: Adapter, places: Mapping[str, Place]) -> None:
    """Refuse files that lack a layer which their config selects; PEFT would leave it without effect, in silence."""
    settings = adapter.settings
    kinds = ("linear",) if settings.is_all_linear else ("linear", "embedding", "head")
    for name, place in places.items():
        if place.part.shape.kind in kinds and name not in adapter.layers and settings.selects(name):
            raise _error(adapter, name, "is selected by target_modules but has no weights; save the adapter again")


def _error(adapter: Adapter, layer: str, what: str) -> CheckpointError:
    return CheckpointError(f"adapter {adapter.path}: layer {layer} {what}", field=layer)
