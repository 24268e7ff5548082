"""The weighted sum of what experts gave: with and without residual, choices that are elsewhere, rows without a place.

    moe_combine.exact/…        the choices of a token climb and fall back, so that a sum kept in 16 bits between them
                               loses what is left over; weights are powers of two
    moe_combine.statistical/…  normal numbers, weights as routing gives them

Where choices are elsewhere their weights are NaN, and so are the rows of y that no place names: what must not be added
must not be multiplied by 0 either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import combine_bound
from octavo.conformance.oracle import moe
from octavo.conformance.trial import HostTensor, Outputs, Trial, given, row_strides, updated, wanted
from octavo.core.backend import RowSpec

SPARE_ROWS = 3
"""Rows of y that no place names."""


@dataclass(frozen=True)
class Point:
    """out [T, width] of y [T · top_k + SPARE_ROWS, width]; `here`: "all" choices, "some" or "none" of them."""

    lane: str
    dtype: torch.dtype
    tokens: int
    top_k: int
    width: int
    has_residual: bool = False
    here: str = "all"
    gap: int = 0
    is_in_place: bool = False

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), f"t{self.tokens}", f"k{self.top_k}", f"w{self.width}"]
        parts += ["residual"] if self.has_residual else []
        parts += [self.here] if self.here != "all" else []
        parts += [f"gap{self.gap}"] if self.gap else []
        return f"moe_combine.{self.lane}/" + "-".join(parts + (["inplace"] if self.is_in_place else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.width, self.dtype, "residual" if self.has_residual else "", self.top_k)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="moe_combine",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "width": str(point.width),
                "top_k": str(point.top_k),
                "tokens": str(point.tokens),
                "residual": "yes" if point.has_residual else "no",
                "here": point.here,
                "stride": "strided" if point.gap else "dense",
            },
            lanes=(point.lane,),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        at = functools.partial(Point, "exact", dtype)
        for tokens in (0, 1, 5, 64, 65):
            yield at(tokens, 4, 48)
        for width in (1, 7, 33, 1536, 4097):
            yield at(3, 2, width)
        for top_k in (1, 6, 8, 10):
            yield at(5, top_k, 40)
            yield at(5, top_k, 40, has_residual=True)
        for here in ("some", "none"):
            yield at(9, 4, 40, here=here)
            yield at(9, 4, 40, has_residual=True, here=here, is_in_place=True)
        yield at(5, 4, 40, has_residual=True, is_in_place=True)
        yield at(5, 4, 40, has_residual=True, gap=8)
        normal = functools.partial(Point, "statistical", dtype)
        yield normal(17, 8, 130)
        yield normal(9, 4, 576, has_residual=True, here="some")


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "moe", "deterministic"}
    if point.tokens in {9, 17}:
        names.add("smoke")
    if point.tokens == 9 and point.width == 40:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens * point.width <= 6000 else set()))


def _faults(point: Point) -> frozenset[str]:
    if not point.tokens:
        return frozenset()
    names = {
        "combine-elsewhere-times-zero": point.here != "all",
        "combine-elsewhere-is-last": point.here != "all",
        "combine-residual-dropped": point.has_residual,
        "combine-16-bit-sum": point.lane == "exact" and point.dtype == torch.bfloat16 and point.top_k > 4,
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build(point: Point, draw: Draw) -> Trial:
    y, places, weights, residual = _drawn(point, draw)

    def run(bench: Bench) -> None:
        call(point, bench, slice(0, point.tokens), "residual" if point.is_in_place else "out")

    def check(outputs: Outputs) -> list[Finding]:
        want = moe.combine(y, places, weights, residual)
        got = outputs["residual" if point.is_in_place else "out"]
        if point.lane == "exact":
            return [exact("out", got, want.out)]
        bound = combine_bound(want.out, want.added, terms=point.top_k, dtype=point.dtype)
        return [statistical("out", got, want.out, bound)]

    strides = row_strides((point.tokens, point.width), point.gap) if point.gap else None
    tensors: list[HostTensor] = [given("y", y, strides=row_strides(y.shape, point.gap) if point.gap else None)]
    tensors += [given("places", places), given("weights", weights)]
    if residual is not None:
        tensors.append((updated if point.is_in_place else given)("residual", residual, strides=strides))
    if not point.is_in_place:
        is_nothing = point.here == "none" or point.width * point.tokens <= 8
        tensors.append(wanted("out", (point.tokens, point.width), point.dtype, strides=strides, may_be_zero=is_nothing))
    return Trial(tuple(tensors), run, check, is_empty=point.tokens == 0)


def call(point: Point, bench: Bench, rows: slice, out: str) -> None:
    """The op for some of the tokens, into the same rows of an output."""
    extra = {"residual": bench["residual"][rows]} if point.has_residual else {}
    op = bench.op("moe_combine", point.spec)
    op(bench["y"], bench["places"][rows], bench["weights"][rows], out=bench[out][rows], **extra)


def _drawn(point: Point, draw: Draw) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y, places, weights, residual."""
    tokens, top_k, width = point.tokens, point.top_k, point.width
    pairs = tokens * top_k
    if point.lane == "exact":
        terms, weights = _climbing(point, draw)
        residual = draw.integers(-63, 63, tokens, width, dtype=point.dtype)
    else:
        terms = draw.normal(tokens, top_k, width)
        weights = draw.uniform(tokens, top_k, low=0.01, high=1.0)
        residual = draw.normal(tokens, width, dtype=point.dtype)
    places = torch.tensor(draw.permutation(pairs), dtype=torch.int64).view(tokens, top_k)
    y = torch.full((pairs + SPARE_ROWS, width), math.nan, dtype=point.dtype)
    y[places.flatten()] = terms.flatten(0, 1).to(point.dtype)
    if point.here != "all":
        gone = (
            draw.integers(0, 1, tokens, top_k) > 0
            if point.here == "some"
            else torch.ones_like(places, dtype=torch.bool)
        )
        y[places[gone]], weights[gone], places[gone] = math.nan, math.nan, -1
    return y, places, weights, residual if point.has_residual else None


def _climbing(point: Point, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """Terms [T, K, width] of 64 … 127, then as much the other way but for ±1 … ±3; weights 1 or 2, one for each token.

    An odd choice is left over, as small as that difference.
    """
    tokens, top_k, width = point.tokens, point.top_k, point.width
    up = draw.integers(64, 127, tokens, top_k // 2, width)
    left = draw.integers(1, 3, tokens, top_k - top_k // 2, width) * draw.signs(tokens, top_k - top_k // 2, width)
    down = left.clone()
    down[:, : top_k // 2] -= up
    weights = torch.exp2(draw.integers(0, 1, tokens, 1)).repeat(1, top_k)
    return torch.cat((up, down), dim=1), weights
