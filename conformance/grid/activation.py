"""Activations without a pair: every kind, of odd sizes, strided, in place, at the ends of its range, and of NaN.

Numbers come in three sorts, as a gate's do (act_mul): normal ones, small ones around which an activation is nearly
linear, and ones so large that it is the identity or vanishes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.act_mul import LARGE
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import gate_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, row_strides, updated, wanted
from octavo.core.backend import ActivationKind, RowSpec


@dataclass(frozen=True)
class Point:
    """x [T, width]; `sort`: "" | "large" (numbers up to LARGE) | "nan" (one in the first row)."""

    dtype: torch.dtype
    kind: ActivationKind
    tokens: int
    width: int
    gap: int = 0
    is_in_place: bool = False
    sort: str = ""

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), self.kind, f"{self.tokens}x{self.width}"]
        parts += [f"gap{self.gap}"] if self.gap else []
        parts += ["inplace"] if self.is_in_place else []
        return "-".join(parts + ([self.sort] if self.sort else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.width, self.dtype, self.kind)


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=f"activation/{point.name}",
            op="activation",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "kind": point.kind,
                "width": str(point.width),
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("statistical", "exact") if point.sort == "nan" else ("statistical",),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for kind in get_args(ActivationKind):
            for width in (1, 17, 64, 129, 1536):
                yield Point(dtype, kind, 5, width)
            yield Point(dtype, kind, 0, 64)
            yield Point(dtype, kind, 130, 33)
            yield Point(dtype, kind, 5, 67, gap=9)
            yield Point(dtype, kind, 5, 67, is_in_place=True)
            yield Point(dtype, kind, 4, 96, sort="large")
            yield Point(dtype, kind, 3, 16, sort="nan")


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.width in {17, 64, 67}:
        names.add("smoke")
    if point.width in {16, 17} and point.tokens:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens * point.width <= 1000 else set()))


def _faults(point: Point) -> frozenset[str]:
    if point.dtype != torch.float32 or not point.tokens:
        return frozenset()
    names = {
        "activation-gelu-by-tanh": point.kind == "gelu",
        "activation-nan-to-zero": point.kind == "relu" and point.sort == "nan",
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build(point: Point, draw: Draw) -> Trial:
    x = draw.normal(point.tokens, point.width, std=3.0, mean=0.3, dtype=point.dtype)
    if point.sort == "large":
        x = draw.uniform(point.tokens, point.width, low=-LARGE, high=LARGE, dtype=point.dtype)
    elif point.tokens:
        x[0, : point.width // 2] *= 2.0**-6
    if point.sort == "nan":
        x[0, draw.permutation(point.width)[0]] = math.nan
    strides = row_strides(x.shape, point.gap) if point.gap else None
    # A few numbers may all be far below 0; what is not a number comes out as it went in.
    facts = {"may_be_zero": point.tokens * point.width <= 32, "is_finite": point.sort != "nan"}
    out_name = "x" if point.is_in_place else "out"
    tensors = [updated("x", x, strides=strides, **facts) if point.is_in_place else given("x", x, strides=strides)]
    tensors += [] if point.is_in_place else [wanted("out", x.shape, point.dtype, strides=strides, **facts)]

    def run(bench: Bench) -> None:
        bench.op("activation", point.spec)(bench["x"], out=bench[out_name], kind=point.kind)

    def check(outputs: Outputs) -> list[Finding]:
        got, want, is_bad = outputs[out_name], rows.activation(x, point.kind), x.isnan()
        bound = gate_bound(want[~is_bad], x.double()[~is_bad], dtype=point.dtype)
        findings = [statistical("out", got[~is_bad], want[~is_bad], bound)]
        return findings + ([exact("out", got[is_bad], want[is_bad])] if point.sort == "nan" else [])

    return Trial(tuple(tensors), run, check, is_empty=point.tokens == 0)
