"""tests/cases_pending.toml stays readable: each case says what it waits for, and stands there once."""

import tomllib
from collections import Counter
from pathlib import Path

CASES = tomllib.loads((Path(__file__).parents[1] / "cases_pending.toml").read_text())["case"]


def test_each_case_is_whole():
    for case in CASES:
        assert set(case) == {"source", "input", "right", "needs"}
        assert all(case.values())


def test_each_source_stands_once():
    assert max(Counter(case["source"] for case in CASES).values()) == 1
