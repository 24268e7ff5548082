"""Rows of a table by id: first and last rows, repeated ids, ids past 2^16, with and without a scale.

Without a scale, or with one that is a power of two, the result is exact. Every row of the table differs from every
other, and holds its own id's parity of scales, so that a row too far shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import rounding_bound
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import GemmSpec, RowSpec, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Point:
    """ids [T] into a table [V, hidden] stored in `stored`, to rows of `dtype`."""

    dtype: torch.dtype
    stored: torch.dtype
    tokens: int
    vocabulary: int
    hidden: int
    scale: float = 1.0
    gap: int = 0

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.stored == self.dtype else f".{dtype_name(self.stored)}")
        tail = ("" if self.scale == 1 else f"-scale{self.scale:.4g}") + (f"-gap{self.gap}" if self.gap else "")
        return f"{dtypes}-t{self.tokens}-{self.vocabulary}x{self.hidden}{tail}"

    @property
    def is_exact(self) -> bool:
        return math.frexp(self.scale)[0] == 0.5

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.hidden, self.dtype, "", self.vocabulary)


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=f"embed/{point.name}",
            op="embed",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": dtype_name(point.stored),
                "tokens": str(point.tokens),
                "vocabulary": str(point.vocabulary),
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("exact",) if point.is_exact else ("statistical",),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=frozenset({"embed-out-of-table"})
            if point.tokens > 2 and 1 < point.vocabulary <= 257
            else frozenset(),
            requires=all_of(computes_in(point.dtype), stores_weights_in(point.stored)),
        )


def _points() -> Iterable[Point]:
    for dtype, stored in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)):
        at = functools.partial(Point, dtype, stored)
        for hidden in (1, 7, 16, 64, 577):
            yield at(9, 257, hidden)
        for tokens in (0, 1, 2, 64, 257):
            yield at(tokens, 100, 48)
        yield at(9, 1, 48)
        yield at(9, 70_001, 8)
        yield at(9, 257, 64, gap=24)
        yield at(9, 257, 64, scale=0.25)
        yield at(9, 257, 64, scale=math.sqrt(640))


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.hidden in {7, 64}:
        names |= {"smoke", "tiny"}
    return frozenset(names | ({"tiny-full"} if point.vocabulary < 1000 else set()))


def build(point: Point, draw: Draw) -> Trial:
    table = draw.normal(point.vocabulary, point.hidden, dtype=point.stored)
    ids = draw.integers(0, point.vocabulary - 1, point.tokens, dtype=torch.int64)
    if point.tokens > 3:
        ids[0], ids[1], ids[2] = point.vocabulary - 1, 0, ids[3]
    shape = (point.tokens, point.hidden)
    weight_spec = WeightSpec(point.vocabulary, point.hidden, point.stored, embedding=True)
    cut = point.vocabulary // 2
    parts = ((table[:cut], 0), (table[cut:], cut)) if cut else ((table, 0),)
    weight = HostWeight("w", GemmSpec(weight_spec, point.dtype, point.dtype), parts)

    def run(bench: Bench) -> None:
        bench.op("embed", point.spec)(bench["ids"], bench.weight("w"), out=bench["out"], scale=point.scale)

    def check(outputs: Outputs) -> list[Finding]:
        want = table.double()[ids] * point.scale
        if point.is_exact:
            return [exact("out", outputs["out"], want)]
        # One product in the output's dtype or in fp32, the scale itself rounded: 2·u of it, and the rounding.
        bound = rounding_bound(want, dtype=point.dtype, inner=2.0**-23 * want.abs())
        return [statistical("out", outputs["out"], want, bound)]

    strides = row_strides(shape, point.gap) if point.gap else None
    tensors = (given("ids", ids), wanted("out", shape, point.dtype, strides=strides))
    return Trial(tensors, run, check, (weight,), is_empty=point.tokens == 0)
