"""RMSNorm: plain and with residual, over rows [T, M] and heads [T, H, D], strided, odd sizes.

The statistical lane judges the norm; the residual that is updated in place is judged beside it. One case has rows of
very different sizes, so that a row normalised with its neighbour's mean stands out.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import norm_bound, rounding_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, row_strides, updated, wanted
from octavo.core.backend import RowSpec

EPS = 1e-5


@dataclass(frozen=True)
class Point:
    """A point of the family's grid.

    Attributes:
        shape: [T, M] or [T, H, D].
        gap: elements between rows of x, out and residual.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_residual: bool = False
    gap: int = 0
    is_in_place: bool = False

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), "x".join(map(str, self.shape))]
        parts += ["residual"] if self.has_residual else []
        parts += [f"gap{self.gap}"] if self.gap else []
        return "-".join(parts + (["inplace"] if self.is_in_place else []))


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=f"rms_norm/{point.name}",
            op="rms_norm",
            spec=RowSpec(point.shape[-1], point.dtype, "residual" if point.has_residual else ""),
            axes={
                "dtype": dtype_name(point.dtype),
                "width": str(point.shape[-1]),
                "residual": "yes" if point.has_residual else "no",
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("statistical",),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for width in (1, 3, 64, 127, 576, 2048, 4097):
            yield Point(dtype, (5, width))
            yield Point(dtype, (5, width), has_residual=True)
        yield Point(dtype, (0, 64))
        yield Point(dtype, (1, 576))
        yield Point(dtype, (300, 64))
        yield Point(dtype, (7, 3, 80))
        yield Point(dtype, (5, 576), gap=5)
        yield Point(dtype, (5, 576), has_residual=True, gap=64)
        yield Point(dtype, (4, 3, 80), gap=16)
        yield Point(dtype, (6, 64), is_in_place=True)
        yield Point(dtype, (6, 64), has_residual=True, is_in_place=True)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.shape in {(5, 64), (5, 127), (5, 576)}:
        names |= {"smoke"}
    if point.shape in {(5, 3), (5, 64), (6, 64)}:
        names |= {"tiny"}
    return frozenset(names | ({"tiny-full"} if point.shape[-1] <= 576 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.has_residual and point.shape == (5, 64):
        names.add("residual-never-written")
    if point.gap and point.dtype == torch.float32:
        names.add("rms-norm-last-stride")
    return frozenset(names)


def build(point: Point, draw: Draw) -> Trial:
    # Rows of sizes 2^-3 … 2^3: a row normalised with another row's mean is off by a factor.
    rows_count = point.shape[0]
    size = torch.exp2(draw.integers(-3, 3, rows_count, *[1] * (len(point.shape) - 1)))
    x = (draw.normal(*point.shape, mean=0.2) * size).to(point.dtype)
    weight = draw.normal(point.shape[-1], mean=1.0, std=0.3)
    residual = (draw.normal(*point.shape) * size).to(point.dtype) if point.has_residual else None
    strides = row_strides(point.shape, point.gap) if point.gap else None

    tensors = [given("weight", weight)]
    tensors.append(updated("x", x, strides=strides) if point.is_in_place else given("x", x, strides=strides))
    if not point.is_in_place:
        tensors.append(wanted("out", point.shape, point.dtype, strides=strides))
    if residual is not None:
        tensors.append(updated("residual", residual, strides=strides))
    out_name = "x" if point.is_in_place else "out"
    spec = RowSpec(point.shape[-1], point.dtype, "residual" if point.has_residual else "")

    def run(bench: Bench) -> None:
        extra = {"residual": bench["residual"]} if point.has_residual else {}
        bench.op("rms_norm", spec)(bench["x"], bench["weight"], out=bench[out_name], eps=EPS, **extra)

    def check(outputs: Outputs) -> list[Finding]:
        summed = x.double() if residual is None else rows.add_residual(residual, x)
        want = rows.rms_norm(summed, weight, EPS)
        bound = norm_bound(want, width=point.shape[-1], dtype=point.dtype)
        findings = [statistical("out", outputs[out_name], want, bound)]
        if residual is not None:
            total = residual.double() + x.double()
            findings.append(
                statistical("residual", outputs["residual"], total, rounding_bound(total, dtype=point.dtype))
            )
        return findings

    return Trial(tuple(tensors), run, check, is_empty=rows_count == 0)
