"""What `make kernels` calls a regression, and that its page shows what was built."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.kernels import compared, page, rendered

FIT: dict[str, float] = {
    "registers": 100, "spill_bytes": 0, "shared_bytes": 65536, "warps": 8, "wgmma": 4, "mma": 0, "loads_16": 2,
    "async_copies_16": 0, "tma_copies": 0, "programs_per_unit": 2, "programs": 132, "limit_us": 10.0,
    "expected_share": 0.9, "is_default": True, "limit_us NVIDIA H200": 10.0, "limit_us NVIDIA H100": 14.3,
}  # fmt: skip


def table(triton: str = "3.9.0", **builds: dict[str, float]) -> dict[str, Any]:
    return {"target": "sm_90", "triton": triton, "builds": {name: FIT | changes for name, changes in builds.items()}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"registers": 110}, None),
        ({"registers": 111}, "a: takes 111 registers instead of 100"),
        ({"spill_bytes": 8}, "a: begins to spill registers (8 bytes)"),
        ({"wgmma": 0, "mma": 8}, "a: has lost its wgmma instructions"),
    ],
)
def test_a_regression_is_named(changes: dict[str, float], said: str | None) -> None:
    faults, _ = compared(table(a={}), table(a=changes))
    assert faults == ([] if said is None else [said])


def test_what_nobody_gets_unasked_may_change() -> None:
    assert compared(table(a={"is_default": False}), table(a={"is_default": False, "registers": 200})) == ([], [])


def test_builds_that_come_and_go_are_noted() -> None:
    faults, notes = compared(table(a={}), table(b={}))
    assert not faults
    assert notes == [
        "b: not in the table; make kernels-write",
        "a: in the table, and no build any more; make kernels-write",
    ]


def test_another_compiler_is_not_compared() -> None:
    faults, notes = compared(table(a={}), table("3.6.0", a={"registers": 200}))
    assert not faults
    assert notes == ["figures are of Triton 3.9.0 and this is 3.6.0: not compared"]


def test_the_table_is_a_line_per_build() -> None:
    text = rendered(table(b={}, a={"registers": 7}))
    assert json.loads(text) == table(b={}, a={"registers": 7})
    assert [line.split('"')[1] for line in text.splitlines()[1:-1]] == ["a", "b"]


def test_the_page_has_a_row_per_default_and_names_the_others_that_spill() -> None:
    builds = {"gemm/x-default": {}, "gemm/x-gemm.3": {"is_default": False, "spill_bytes": 16}}
    text = page([table(**builds)])
    assert "| `gemm/x` | 100 | 0 | 64 | 8 | 2 | 4 | 0 | 2 | 10 | 14.3 | 90% |" in text
    assert "spill (bytes a thread): `gemm/x-gemm.3` 16." in text
