"""Nearest names, and sizes as people write them."""

import pytest

from octavo.core.base.names import did_you_mean
from octavo.core.base.units import format_bytes, parse_bytes


def test_a_near_name_is_offered():
    assert did_you_mean("blok_size", ["block_size", "dtype"]) == "; did you mean 'block_size'?"


def test_a_far_name_gets_the_list():
    assert did_you_mean("xyzzy", ["run", "bench"]) == "; known: bench, run"


def test_no_names_at_all():
    assert did_you_mean("x", []) == ""


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("17", 17), ("2GiB", 2 << 30), ("2gib", 2 << 30), ("2 GB", 2 * 10**9), ("1.5KiB", 1536), ("7B", 7)],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2GiBs", "1e9", "two"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (1000 << 20, "0.977 GiB"),
        (3 << 29, "1.5 GiB"),
        (5 << 40, "5 TiB"),
    ],
)
def test_sizes_are_shown(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize("count", [1, 1 << 12, 3 << 20, 5 << 30])
def test_what_is_shown_can_be_read(count):
    assert parse_bytes(format_bytes(count)) == count
