"""Which part of an axis each rank holds."""

from __future__ import annotations

import pytest

from octavo.core.base.errors import ConfigError
from octavo.core.parallel.mesh import even_range, kv_head_range, padded_range
from octavo.core.parallel.shard import Shard


@pytest.mark.parametrize(("total", "size"), [(6, 1), (6, 2), (6, 3), (64, 8), (0, 2)])
def test_even_parts_are_equal_and_cover_the_axis(total: int, size: int) -> None:
    parts = [even_range(total, rank, size, "heads") for rank in range(size)]
    assert {stop - start for start, stop in parts} == {total // size}
    assert [x for start, stop in parts for x in range(start, stop)] == list(range(total))


def test_an_axis_that_does_not_divide_is_refused_with_its_field() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 4, which can't split num_attention_heads, 6") as e:
        even_range(6, 0, 4, "num_attention_heads")
    assert e.value.field == "tensor_parallel_size"


@pytest.mark.parametrize(("total", "size"), [(1, 1), (5, 2), (7, 4), (8, 4), (50257, 8)])
def test_padded_parts_cover_the_axis_and_only_the_last_is_shorter(total: int, size: int) -> None:
    parts = [padded_range(total, rank, size, "vocab_size") for rank in range(size)]
    lengths = [stop - start for start, stop in parts]
    assert len(set(lengths[:-1])) <= 1
    assert 0 < lengths[-1] <= lengths[0]
    assert [x for start, stop in parts for x in range(start, stop)] == list(range(total))


@pytest.mark.parametrize(("total", "size"), [(1, 2), (5, 4), (9, 8)])
def test_an_axis_too_short_for_all_ranks_is_refused(total: int, size: int) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        padded_range(total, 0, size, "vocab_size")


@pytest.mark.parametrize(("kv_heads", "size"), [(8, 2), (8, 8), (2, 4), (1, 8), (3, 1), (4, 8)])
@pytest.mark.parametrize("queries_per_head", [1, 3])
def test_a_ranks_query_heads_find_their_kv_heads(kv_heads: int, size: int, queries_per_head: int) -> None:
    heads = kv_heads * queries_per_head
    if heads % size:
        heads = kv_heads * size
    for rank in range(size):
        first_query, end_query = even_range(heads, rank, size, "num_attention_heads")
        start, stop = kv_head_range(kv_heads, rank, size, "num_key_value_heads")
        local = (end_query - first_query) // (stop - start)
        for query in range(first_query, end_query):
            assert start + (query - first_query) // local == query // (heads // kv_heads)


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 2), (3, 4), (6, 4)])
def test_kv_heads_that_neither_divide_nor_are_shared_evenly_are_refused(kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        kv_head_range(kv_heads, 0, size, "num_key_value_heads")


def test_a_single_rank_holds_everything() -> None:
    shard = Shard.single()
    assert shard.is_whole
    parts = shard.split(7, "x"), shard.kv_heads(3), shard.padded(5)
    assert parts == ((0, 7), (0, 3), (0, 5))
