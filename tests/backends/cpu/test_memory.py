"""Memory of weights: carved from shared mappings, unchanged by the move into huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from octavo.backends.cpu.memory import HUGE_PAGE_BYTES, MADV_COLLAPSE, MAPPING_BYTES, WeightArena, _advise

ROLLUP = Path("/proc/self/smaps_rollup")


def huge_bytes() -> int:
    """Bytes of this process in huge pages."""
    found = re.search(r"AnonHugePages:\s+(\d+) kB", ROLLUP.read_text())
    return int(found[1]) * 1024 if found else 0


def test_settling_moves_every_mapping_and_changes_nothing() -> None:
    """The first mappings as well as the last, which alone was moved once."""
    if not ROLLUP.exists() or not _advise(0, 0, MADV_COLLAPSE):
        pytest.skip("this system can't collapse pages")
    arena = WeightArena()
    rows = MAPPING_BYTES // 4 // 1000
    weights = [arena.zeros(rows // 2, 1000, dtype=torch.float32) for _ in range(5)]  # three mappings
    for i, weight in enumerate(weights):
        weight.fill_(i + 1)
    before = huge_bytes()
    addresses = [weight.data_ptr() for weight in weights]
    arena.settle().join()
    if huge_bytes() == before:
        pytest.skip("this system has no huge pages to give")
    assert huge_bytes() - before >= sum(weight.nbytes for weight in weights) - 4 * HUGE_PAGE_BYTES
    assert [weight.data_ptr() for weight in weights] == addresses
    assert all(bool((weight == i + 1).all()) for i, weight in enumerate(weights))


def test_an_arena_goes_on_after_settling() -> None:
    arena = WeightArena()
    first = arena.zeros(100, dtype=torch.float32)
    arena.settle().join()
    second = arena.zeros(100, dtype=torch.float32)
    first.fill_(1)
    assert bool((second == 0).all())
    arena.settle().join()
