"""Pairs sorted by expert: all experts here or some of them, experts without a pair, ids that are nobody's, no pair.

    ids [T, K]     "even"     distinct experts for each token, as routing gives them
                   "one"      every pair has the same expert
                   "few"      two experts in all: the others have no pair
                   "stray"    ids of -1 and beyond the last expert among them

Every number that comes out is compared: the order within an expert, the unused tail, the bounds of empty segments.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.oracle import moe
from octavo.conformance.trial import Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import RowSpec


@dataclass(frozen=True)
class Point:
    """ids [T, top_k] of `total` experts, of which `experts` are here, from `first` on."""

    tokens: int
    top_k: int
    total: int
    first: int = 0
    experts: int = 0
    ids: str = "even"
    dtype: torch.dtype = torch.int64
    gap: int = 0

    @property
    def here(self) -> int:
        return self.experts or self.total

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), f"t{self.tokens}", f"k{self.top_k}", f"e{self.total}"]
        parts += [f"from{self.first}.{self.here}"] if self.here != self.total else []
        parts += [self.ids] if self.ids != "even" else []
        return "moe_permute/" + "-".join(parts + ([f"gap{self.gap}"] if self.gap else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.here, self.dtype, extent=self.top_k)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="moe_permute",
            spec=point.spec,
            axes={
                "ids": point.ids,
                "dtype": dtype_name(point.dtype),
                "experts": str(point.here),
                "here": "all" if point.here == point.total else "some",
                "top_k": str(point.top_k),
                "tokens": str(point.tokens),
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("exact",),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.int64, torch.int32):
        at = functools.partial(Point, dtype=dtype)
        for tokens in (0, 1, 2, 5, 16, 17, 64, 65, 300):
            yield at(tokens, 4, 60)
        for total, top_k in ((1, 1), (8, 2), (8, 8), (128, 8), (256, 8), (384, 10), (512, 10)):
            yield at(9, top_k, total)
        for ids in ("one", "few", "stray"):
            yield at(9, 2, 8, ids=ids)
            yield at(33, 4, 60, 15, 15, ids=ids)
        for first, experts in ((0, 4), (4, 4), (7, 1)):
            yield at(9, 2, 8, first, experts)
        yield at(40, 8, 256, 224, 32)
        yield at(9, 2, 8, gap=5)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "moe", "deterministic"}
    if point.tokens == 9 and point.total == 8:
        names |= {"tiny", "smoke"}
    return frozenset(names | ({"tiny-full"} if point.tokens <= 65 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = {
        "permute-order-reversed": point.ids == "one",
        "permute-first-expert-ignored": point.first > 0,
        "permute-tail-unwritten": point.here != point.total,
        "permute-stray-counted": point.ids == "stray" and point.first == 0,
        "permute-no-tokens": point.tokens == 0,
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build(point: Point, draw: Draw) -> Trial:
    ids = _ids(point, draw)
    shape = (point.tokens, point.top_k)
    strides = row_strides(shape, point.gap) if point.gap else None

    def run(bench: Bench) -> None:
        bench.op("moe_permute", point.spec)(
            bench["ids"],
            first_expert=point.first,
            out_rows=bench["rows"],
            out_places=bench["places"],
            segment_start=bench["start"],
        )

    def check(outputs: Outputs) -> list[Finding]:
        want = moe.permute(ids, first_expert=point.first, experts=point.here)
        pairs = {"rows": want.rows, "places": want.places} if point.tokens else {}  # of no token the bounds alone
        return [exact(name, outputs[name], x) for name, x in {**pairs, "start": want.segment_start}.items()]

    tensors = (
        given("ids", ids, strides=strides),
        wanted("rows", (point.tokens * point.top_k,), torch.int64, may_be_zero=True),
        wanted("places", shape, torch.int64, strides=strides, may_be_zero=True),
        wanted("start", (point.here + 1,), torch.int32, may_be_zero=True),
    )
    return Trial(tensors, run, check)


def _ids(point: Point, draw: Draw) -> torch.Tensor:
    tokens, total, shape = point.tokens, point.total, (point.tokens, point.top_k)
    if point.ids == "one":
        ids = torch.full(shape, draw.pick(range(point.first, point.first + point.here)), dtype=torch.int64)
    elif point.ids == "few":
        pair = torch.tensor(draw.permutation(total)[:2])
        ids = pair[draw.integers(0, 1, *shape, dtype=torch.int64)]
    else:
        chosen = [draw.permutation(total)[: point.top_k] for _ in range(tokens)]
        ids = torch.tensor(chosen, dtype=torch.int64).view(shape)
    if point.ids == "stray":
        stray = torch.tensor([-1, total, total + 1000])[draw.integers(0, 2, *shape, dtype=torch.int64)]
        ids = torch.where(draw.integers(0, 2, *shape) > 1, stray, ids)
    return ids.to(point.dtype)
