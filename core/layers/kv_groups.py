"""How a model's layers share the KV pools: groups of equal layer count, one block table each.

    18 layers, every sixth full, the others sliding (6 groups of 3):

            pool 0   pool 1   pool 2
    full      5        11       17        one block id of a group = that block in each of the 3 pools
    slide     0         1        2        a block id belongs to one group at a time, so one free list
    slide     3         4        6        serves all groups, and a block that leaves a window can be
    ...                                   taken by any of them

A group whose layers run out leaves its last pools unused: bytes lost in every block it holds. Larger groups mean
fewer block tables and plans in a step. The rule takes the largest group size that loses at most `MAX_PADDING` of the
slots; a single spec gives one group with all layers and loses nothing. The engine allocates the pools and keeps the
block tables; this module only counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.backend.kv import KVCacheSpec

MAX_PADDING = 1 / 12
"""Largest share of layer slots that may stay unused for the sake of fewer groups."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers with one spec, one block table and one plan in a step.

    Attributes:
        spec: what all its layers need.
        layer_indices: its layers, ascending; the layer at place i views pool i.
    """

    spec: KVCacheSpec
    layer_indices: tuple[int, ...]


def group_layers(kv_specs: Sequence[KVCacheSpec]) -> tuple[KVGroup, ...]:
    """Groups of layers, ordered by their first layer.

    Args:
        kv_specs: one per layer, in layer order.

    Returns:
        The groups. `num_pools` of them tells how many pools serve them all.
    """
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(kv_specs):
        by_spec.setdefault(spec, []).append(layer)
    size = _group_size([len(layers) for layers in by_spec.values()])
    groups = [
        KVGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in by_spec.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layer_indices[0]))


def num_pools(groups: Sequence[KVGroup]) -> int:
    """How many pools the groups share: the layer count of the largest."""
    return max((len(group.layer_indices) for group in groups), default=0)


def pool_block_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes of one block in one pool: enough for the largest spec."""
    return max((group.spec.block_bytes for group in groups), default=0)


def layer_places(groups: Sequence[KVGroup]) -> tuple[tuple[int, int], ...]:
    """(group index, pool index) of each layer, in layer order."""
    places = {
        layer: (group_index, pool_index)
        for group_index, group in enumerate(groups)
        for pool_index, layer in enumerate(group.layer_indices)
    }
    return tuple(places[layer] for layer in range(len(places)))


def _group_size(counts: Sequence[int]) -> int:
    """The largest group size that leaves at most MAX_PADDING of all slots unused; 1 always does."""
    layers = sum(counts)
    for size in range(max(counts, default=1), 1, -1):
        slots = sum(-(-count // size) * size for count in counts)
        if slots - layers <= MAX_PADDING * slots:
            return size
    return 1
