"""The search for launch parameters, against a device that is a formula."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.backends.common.tune import Trial, as_toml, neighbours, tune
from octavo.backends.common.tuning import Entry, TuningTable, read_entries

ENTRIES = [
    Entry("gemm", {"m": (1, 16)}, {"BLOCK": 16}, {"num_warps": 2, "num_stages": 2}, "model"),
    Entry("gemm", {}, {"BLOCK": 16}, {"num_warps": 2, "num_stages": 2}, "model"),
]


def formula(entry: Entry) -> float:
    """Fastest at 64, 8 and 4."""
    tile, options = entry.tile, entry.options
    off = math.log2(tile["BLOCK"] / 64), math.log2(options["num_warps"] / 8), options["num_stages"] - 4
    return 1e-3 * (1 + sum(distance**2 for distance in off))


def trial(m: int, *, wrong_from: int = 1 << 30, broken_from: int = 1 << 30) -> Trial:
    def call(table: TuningTable) -> torch.Tensor:
        block = table.pick("gemm", m=m).tile["BLOCK"]
        if block >= broken_from:
            raise RuntimeError("out of shared memory")
        return torch.ones(4) * (2 if block >= wrong_from else 1)

    return Trial(f"m{m}", call, lambda table: formula(table.pick("gemm", m=m)))


def test_each_entry_is_searched_for_the_workloads_that_it_serves() -> None:
    found = list(tune(TuningTable(ENTRIES), [trial(8)], "a formula"))
    first, last = found
    assert first.entry.constants == {"BLOCK": 64, "num_warps": 8, "num_stages": 4}
    assert first.gain == pytest.approx(13.0)
    assert "a formula: 13.00x of BLOCK 16, num_warps 2, num_stages 2, over m8" in first.entry.why
    assert last.entry is ENTRIES[1]
    assert last.workloads == ()


@pytest.mark.parametrize("fault", ["wrong_from", "broken_from"])
def test_parameters_with_other_numbers_or_errors_are_passed_over(fault: str) -> None:
    (first, _) = tune(TuningTable(ENTRIES), [trial(8, **{fault: 64})], "a formula")
    assert first.entry.constants == {"BLOCK": 32, "num_warps": 8, "num_stages": 4}


def test_nothing_is_changed_for_less_than_the_noise() -> None:
    level = Trial("level", trial(8).call, lambda table: 1.0 - 1e-3 * table.pick("gemm", m=8).tile["BLOCK"] / 16)
    (first, _) = tune(TuningTable(ENTRIES), [level], "a formula")
    assert first.entry is ENTRIES[0]


@pytest.mark.parametrize(
    ("name", "value", "steps"),
    [
        ("PER_UNIT", 1, (2,)),
        ("GROUP_M", 8, (4, 16)),
        ("SWAP", 1, (0,)),
        ("LIBRARY", 0, (1,)),
        ("num_stages", 1, (2,)),
        ("PROMOTE", 32, ()),
    ],
)
def test_no_value_is_tried_that_means_nothing(name: str, value: int, steps: tuple[int, ...]) -> None:
    entry = Entry("gemm", {}, {name: value}, {}, "model")
    assert tuple(neighbour.tile[name] for neighbour in neighbours(entry)) == steps


def test_only_the_kernels_asked_for_are_searched() -> None:
    assert list(tune(TuningTable(ENTRIES), [trial(8)], "a formula", only="attention")) == []


def test_what_is_written_reads_back_the_same() -> None:
    entry = Entry("gemm", {"m": (1, 16), "dtype": "bfloat16"}, {"BLOCK": 16}, {"num_warps": 2}, 'µs "quoted"', "x.toml")
    bare = Entry("gemm", {}, {}, {}, "all", "x.toml")
    text = as_toml([entry, bare], "Measured.\nTwice.")
    assert text.startswith("# Measured.\n# Twice.\n")
    assert read_entries("x.toml", text) == [entry, bare]
