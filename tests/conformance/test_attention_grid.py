"""Attention's grid: batches laid out as engines lay them out, needles that can be found, all pairs, any KV layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.grid.batch import Request, lay_out
from octavo.conformance.grid.needle import find_needles
from octavo.conformance.grid.pairwise import pairwise
from octavo.conformance.harness.host import CAPABILITIES, HostBackend
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.harness.worker import InProcess, run_cases
from octavo.conformance.mutants.base import before, broken
from octavo.conformance.oracle.attention import Rule, visible
from octavo.conformance.oracle.quantise import codes_apart
from octavo.conformance.suite import families, select
from octavo.core.backend import KVLayout

KV_OPS = ("write_kv", "rope_write_kv", "copy_blocks", "gather_blocks", "scatter_blocks", "paged_attention")


def draw(name: str = "t") -> Draw:
    return Draw(1, name, "paged_attention", Facts.of(CAPABILITIES))


def test_pairwise_covers_every_pair_that_is_valid_with_far_fewer_points() -> None:
    axes = {"a": range(7), "b": range(5), "c": "xyz", "d": (False, True)}
    points = list(pairwise(axes, lambda p: not (p["a"] == 0 and p["d"])))
    assert len(points) < 60
    for (p, xs), (q, ys) in itertools.combinations(axes.items(), 2):
        seen = {(point[p], point[q]) for point in points}
        wanted = {(x, y) for x, y in itertools.product(xs, ys) if not ({p: x, q: y}.get("a") == 0 and q == "d" and y)}
        assert seen == wanted
    assert points == list(pairwise(axes, lambda p: not (p["a"] == 0 and p["d"])))


def test_batches_share_blocks_pad_with_poison_and_leave_the_null_block_alone() -> None:
    requests = (Request(2, 40), Request(1, 33, shared_blocks=2), Request(0, 0), Request(1, 0))
    batch = lay_out(draw(), requests, 16, extra_columns=2)
    assert [len(ids) for ids in batch.ids] == [3, 3, 0, 0]
    assert batch.ids[0][:2] == batch.ids[1][:2]
    assert batch.ids[0][2] != batch.ids[1][2]
    owned = {block for ids in batch.ids for block in ids}
    assert 0 not in owned
    assert not owned & set(batch.poisoned)
    assert batch.table.shape == (4, 5)
    for row, ids in zip(batch.table.tolist(), batch.ids, strict=True):
        assert tuple(row[: len(ids)]) == ids
        assert set(row[len(ids) :]) <= set(batch.poisoned)
    assert 0 in batch.poisoned
    assert all(0 <= block < batch.num_blocks for block in batch.poisoned)
    last = [ids[2] for ids in batch.ids[:2]]
    assert batch.slots().tolist() == [last[0] * 16 + 6, last[0] * 16 + 7, last[1] * 16, -1]


@pytest.mark.parametrize(("rows", "window", "gone"), [(1, 17, 2), (4, 17, 1), (1, 100, 0), (1, 1, 3), (50, 1, 0)])
def test_blocks_that_left_the_window_are_gone(rows: int, window: int, gone: int) -> None:
    batch = lay_out(draw(), (Request(rows, 50),), 16, window=window)
    assert batch.ids[0][:gone] == (None,) * gone
    assert None not in batch.ids[0][gone:]
    assert set(batch.table[0, :gone].tolist()) <= set(batch.poisoned)


@pytest.mark.parametrize("window", [None, 1, 15, 17])
@pytest.mark.parametrize("request_", [Request(1, 70), Request(8, 50), Request(4, 4), Request(1, 0), Request(3, 1)])
def test_needles_are_visible_or_have_a_visible_decoy(request_: Request, window: int | None) -> None:
    rule = Rule(1.0, window=window)
    needle = find_needles(request_, 16, rule, 4, draw(f"{window}{request_}"))
    seen = visible(request_.num_rows, request_.num_keys, rule)
    for row, chosen, winners in zip(seen, needle.chosen, needle.winners, strict=True):
        for target, winner in zip(chosen, winners, strict=True):
            if not bool(row.any()):
                assert target is winner is None
            else:
                assert bool(row[winner])
                assert winner == (target if bool(row[target]) else needle.decoys[target])
    assert not set(needle.decoys.values()) & set(needle.targets)


def test_needles_reach_both_edges_and_something_hidden() -> None:
    needle = find_needles(Request(4, 70), 16, Rule(1.0, window=17), 8, draw("edges"))
    hidden = {target for row, winner in zip(needle.chosen, needle.winners, strict=True)
              for target, w in zip(row, winner, strict=True) if target != w}  # fmt: skip
    assert hidden
    assert {t for row in needle.chosen for t in row} == set(needle.targets)


def test_codes_apart_counts_over_zero_and_sends_nan_far_away() -> None:
    codes = torch.tensor([1, 0, 0x81, 0x30, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    want = torch.tensor([0, 0, 1, 0x31, 0], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert codes_apart(codes, want).tolist() == [1, 0, 2, 1, 256]


def small(op: str) -> list[Case]:
    return [c for c in select("smoke", op=op) if int(c.axes.get("context", "0")) < 200][:12]


@pytest.mark.parametrize(
    "layout", [*({"layout": x} for x in KVLayout if x is not KVLayout.MLA), {"is_interleaved": True}]
)
def test_every_layout_of_the_cache_passes(layout: dict[str, Any]) -> None:
    cases = [case for op in KV_OPS for case in small(op)]
    results, _ = run_cases(InProcess(HostBackend(**layout)), cases, seed=6)
    assert [f"{r.name}: {r.detail}" for r in results if r.status is not Status.PASS] == []


def failed_by(change: Any, prefix: str) -> list[CaseResult]:
    """Cases of a family that a paged_attention with changed arguments fails."""
    cases = [c for c in families().values() if c.name.startswith(prefix) and "smoke" in c.profiles]
    backend = HostBackend(broken(("paged_attention",), before(change)))
    results, _ = run_cases(InProcess(backend), cases, seed=7)
    return [r for r in results if r.status is Status.FAIL]


@pytest.mark.parametrize("lane", ["statistical", "needle", "visible"])
def test_each_lane_alone_finds_a_window_that_is_one_too_small(lane: str) -> None:
    def narrow(call: dict[str, Any]) -> None:
        call["window"] = call["window"] - 1 if call["window"] else 37

    assert failed_by(narrow, f"paged_attention.{lane}/")
