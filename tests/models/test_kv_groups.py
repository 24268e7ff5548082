"""Layers in groups of equal layer count over one set of pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.backend.kv import KVCacheSpec
from octavo.core.layers.kv_groups import MAX_PADDING, group_layers, layer_places, num_pools, pool_block_bytes

FULL = KVCacheSpec(1, 256, 256, torch.float32, 16)
SLIDING = KVCacheSpec(1, 256, 256, torch.float32, 16, window=512)
WIDE = KVCacheSpec(4, 256, 256, torch.float32, 16)


def pattern(layers: int, period: int = 6) -> list[KVCacheSpec]:
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(layers)]


@pytest.mark.parametrize(
    ("layers", "groups", "pools"),
    [(18, 6, 3), (26, 7, 4), (34, 6, 6), (48, 5, 10), (62, 5, 13)],  # the published gemma-3 models
)
def test_gemma_patterns(layers, groups, pools):
    made = group_layers(pattern(layers))
    assert (len(made), num_pools(made)) == (groups, pools)


def test_one_spec_is_one_group_with_all_layers():
    (group,) = group_layers([FULL] * 30)
    assert group.layer_indices == tuple(range(30))
    assert num_pools([group]) == 30


def test_block_bytes_fit_the_largest_spec():
    assert pool_block_bytes(group_layers([FULL, WIDE])) == WIDE.block_bytes == 4 * FULL.block_bytes


@given(st.lists(st.sampled_from([FULL, SLIDING, WIDE]), min_size=1, max_size=70))
def test_every_layer_has_one_place_and_little_is_padded(specs):
    groups = group_layers(specs)
    places = layer_places(groups)
    assert len(set(places)) == len(specs)
    for layer, (group, pool) in enumerate(places):
        assert groups[group].layer_indices[pool] == layer
        assert groups[group].spec == specs[layer]
        assert pool < num_pools(groups)
    slots = len(groups) * num_pools(groups)
    assert slots - len(specs) <= MAX_PADDING * slots
