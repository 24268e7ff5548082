"""Tuning tables: the first entry that fits, refusals that name the file, and every backend's own table."""

from __future__ import annotations

import importlib.resources

import pytest

from octavo.backends.common.tuning import PinnedTable, TuningTable, read_entries
from octavo.core.base.errors import ConfigError

TEXT = """
[[entry]]
kernel = "gemm"
when = { dtype = "bfloat16", m = [1, 16] }
tile = { BLOCK = 16 }
options = { num_warps = 4 }
why = "few rows"

[[entry]]
kernel = "gemm"
when = { m = [1, 64] }
tile = { BLOCK = 64 }

[[entry]]
kernel = "gemm"
tile = { BLOCK = 128 }
"""


@pytest.fixture
def table() -> TuningTable:
    return TuningTable(read_entries("gemm.toml", TEXT))


@pytest.mark.parametrize(
    ("question", "block"),
    [
        ({"dtype": "bfloat16", "m": 1}, 16),
        ({"dtype": "bfloat16", "m": 16}, 16),
        ({"dtype": "bfloat16", "m": 17}, 64),
        ({"dtype": "float16", "m": 1}, 64),
        ({"dtype": "float16", "m": 65}, 128),
        ({}, 128),
    ],
)
def test_the_first_entry_that_fits_is_taken(table: TuningTable, question: dict[str, int | str], block: int) -> None:
    assert table.pick("gemm", **question).tile["BLOCK"] == block


def test_constants_are_tile_and_options(table: TuningTable) -> None:
    assert table.pick("gemm", dtype="bfloat16", m=1).constants == {"BLOCK": 16, "num_warps": 4}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[entry]", "tuning file x.toml"),
        ("[[entry]]\nkernel = 'a'\n", "'tile'"),
        ("[[entry]]\nkernel = 'a'\ntile = {}\nwhere = 3\n", "unknown keys ['where']"),
        ("other = 1\n", "'entry'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"tuning file x\.toml") as caught:
        read_entries("x.toml", text)
    assert said in str(caught.value)


def test_a_kernel_whose_last_entry_does_not_fit_everything_is_refused() -> None:
    with pytest.raises(ConfigError, match="tuning of gemm: its last entry has a `when`"):
        TuningTable(read_entries("x.toml", TEXT)[:2])


def test_a_pinned_entry_is_taken_wherever_it_fits(table: TuningTable) -> None:
    second = table.by_kernel["gemm"][1]
    pinned = PinnedTable(table, second)
    assert pinned.pick("gemm", dtype="bfloat16", m=65).tile["BLOCK"] == 128
    assert not pinned.was_taken
    assert pinned.pick("gemm", dtype="bfloat16", m=1) is second
    assert pinned.was_taken


def test_a_candidate_stands_in_one_entrys_place_alone(table: TuningTable) -> None:
    first, second, _ = table.by_kernel["gemm"]
    pinned = PinnedTable(table, second, instead_of=first)
    assert pinned.pick("gemm", dtype="bfloat16", m=1) is second
    assert pinned.pick("gemm", m=128).tile["BLOCK"] == 128


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_a_backends_table_can_be_read_and_gives_its_reasons(vendor: str) -> None:
    table = TuningTable.load(importlib.resources.files(f"octavo.backends.{vendor}") / "tuning")
    for kernel, entries in table.by_kernel.items():
        for index, entry in enumerate(entries):
            assert len(entry.why) > 5, f"{kernel} entry {index} does not say why"


def test_both_backends_have_tables_for_the_same_kernels() -> None:
    tables = [TuningTable.load(importlib.resources.files(f"octavo.backends.{v}") / "tuning") for v in ("cuda", "rocm")]
    assert tables[0].by_kernel.keys() == tables[1].by_kernel.keys()
