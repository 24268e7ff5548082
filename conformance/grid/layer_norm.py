"""LayerNorm: with and without bias and residual, over rows and heads, strided, of odd sizes, and far from zero.

Rows of one case differ in size, so that a row normalised with its neighbour's mean stands out. "far": rows that vary
by 1 around OFFSET: the difference of two means of squares has nothing of their variance left.
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
from octavo.conformance.lanes.tolerance import layer_norm_bound, rounding_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, row_strides, updated, wanted
from octavo.core.backend import RowSpec

EPS = 1e-5
OFFSET = {torch.float32: 4096.0, torch.bfloat16: 32.0, torch.float16: 256.0}
"""So far from 0 that what is stored still tells numbers apart that differ by a quarter. Never written to."""


@dataclass(frozen=True)
class Point:
    """A point of the family's grid.

    Attributes:
        shape: [T, M] or [T, H, D].
        gap: elements between rows of x, out and residual.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    has_bias: bool = True
    has_residual: bool = False
    gap: int = 0
    is_in_place: bool = False
    is_far: bool = False

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), "x".join(map(str, self.shape))]
        parts += [] if self.has_bias else ["nobias"]
        parts += ["residual"] if self.has_residual else []
        parts += [f"gap{self.gap}"] if self.gap else []
        return "-".join(parts + (["inplace"] if self.is_in_place else []) + (["far"] if self.is_far else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.shape[-1], self.dtype, "residual" if self.has_residual else "")


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=f"layer_norm/{point.name}",
            op="layer_norm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "width": str(point.shape[-1]),
                "bias": "yes" if point.has_bias else "no",
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
            yield Point(dtype, (5, width), has_residual=width in {3, 127, 2048})
        yield Point(dtype, (5, 64), has_bias=False)
        yield Point(dtype, (5, 64), has_bias=False, has_residual=True)
        yield Point(dtype, (0, 64))
        yield Point(dtype, (1, 576))
        yield Point(dtype, (300, 64))
        yield Point(dtype, (7, 3, 80))
        yield Point(dtype, (5, 576), gap=5)
        yield Point(dtype, (5, 576), has_residual=True, gap=64)
        yield Point(dtype, (4, 3, 80), gap=16)
        yield Point(dtype, (6, 64), is_in_place=True)
        yield Point(dtype, (6, 64), has_residual=True, is_in_place=True)
        yield Point(dtype, (6, 96), is_far=True)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.shape in {(5, 64), (5, 127), (5, 576), (6, 96)}:
        names |= {"smoke"}
    if point.shape in {(5, 3), (5, 64), (6, 64), (6, 96)}:
        names |= {"tiny"}
    return frozenset(names | ({"tiny-full"} if point.shape[-1] <= 576 else set()))


def _faults(point: Point) -> frozenset[str]:
    if point.dtype != torch.float32 or not point.shape[0]:
        return frozenset()
    names = {
        "layer-norm-bias-dropped": point.has_bias,
        "layer-norm-residual-never-written": point.has_residual,
        "layer-norm-padded-width": point.shape[-1] in {3, 127},
        "layer-norm-squares-cancel": point.is_far,
        "layer-norm-last-stride": bool(point.gap),
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build(point: Point, draw: Draw) -> Trial:
    x, residual = _drawn(point, draw)
    width = point.shape[-1]
    weight = draw.normal(width, mean=1.0, std=0.3)
    bias = draw.normal(width) if point.has_bias else None
    strides = row_strides(point.shape, point.gap) if point.gap else None

    # Of one column nothing is left but the bias.
    may_be_zero = width == 1 and not point.has_bias
    tensors = [given("weight", weight)]
    tensors.append(updated("x", x, strides=strides) if point.is_in_place else given("x", x, strides=strides))
    if not point.is_in_place:
        tensors.append(wanted("out", point.shape, point.dtype, strides=strides, may_be_zero=may_be_zero))
    tensors += [] if bias is None else [given("bias", bias)]
    tensors += [] if residual is None else [updated("residual", residual, strides=strides)]
    out_name = "x" if point.is_in_place else "out"

    def run(bench: Bench) -> None:
        extra = {"residual": bench["residual"]} if point.has_residual else {}
        extra |= {"bias_M": bench["bias"]} if point.has_bias else {}
        bench.op("layer_norm", point.spec)(bench["x"], bench["weight"], out=bench[out_name], eps=EPS, **extra)

    def check(outputs: Outputs) -> list[Finding]:
        summed = x.double() if residual is None else rows.add_residual(residual, x)
        want = rows.layer_norm(summed, weight, bias, EPS)
        bound = layer_norm_bound(
            want.out, want.scaled, want.shift, size=want.size, inverse=want.inverse, dtype=point.dtype
        )
        findings = [statistical("out", outputs[out_name], want.out, bound)]
        if residual is not None:
            total = residual.double() + x.double()
            rounding = rounding_bound(total, dtype=point.dtype)
            findings.append(statistical("residual", outputs["residual"], total, rounding))
        return findings

    return Trial(tuple(tensors), run, check, is_empty=point.shape[0] == 0)


def _drawn(point: Point, draw: Draw) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x and the residual."""
    if point.is_far:
        sign = draw.signs(point.shape[0], 1)
        return (sign * OFFSET[point.dtype] + draw.normal(*point.shape)).to(point.dtype), None
    size = torch.exp2(draw.integers(-3, 3, point.shape[0], *[1] * (len(point.shape) - 1)))
    x = (draw.normal(*point.shape, mean=0.5) * size).to(point.dtype)
    return x, (draw.normal(*point.shape) * size).to(point.dtype) if point.has_residual else None
