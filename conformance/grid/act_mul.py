"""Gated activations: every gate of the contract, of odd sizes, strided, and at the ends of its range.

Gates come in three sorts: normal numbers, numbers around zero where the activation is nearly linear, and numbers so
large that it is the identity or vanishes. In fp16 a case has products near the largest number: an intermediate of 16
bits that holds g·g·g, or e^-g, overflows on the way to a result that does not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import get_args

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import gate_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import Gate, RowSpec

LARGE = 180.0
"""180² is below half of fp16's largest number, which is what outputs are poisoned with."""


@dataclass(frozen=True)
class Point:
    """x [T, 2 · width]; `is_large`: gates and ups up to LARGE."""

    dtype: torch.dtype
    gate: Gate
    tokens: int
    width: int
    gap: int = 0
    is_large: bool = False

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), self.gate, f"{self.tokens}x{self.width}"]
        parts += [f"gap{self.gap}"] if self.gap else []
        return "-".join(parts + (["large"] if self.is_large else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(2 * self.width, self.dtype, self.gate)


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=f"act_mul/{point.name}",
            op="act_mul",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "gate": point.gate,
                "width": str(point.width),
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
        for gate in get_args(Gate):
            for width in (1, 7, 15, 16, 17, 64, 129, 1536):
                yield Point(dtype, gate, 5, width)
            yield Point(dtype, gate, 0, 64)
            yield Point(dtype, gate, 1, 576)
            yield Point(dtype, gate, 130, 33)
            yield Point(dtype, gate, 5, 67, gap=9)
            yield Point(dtype, gate, 4, 96, is_large=True)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.width in {17, 64, 67}:
        names.add("smoke")
    if point.width in {7, 16, 17} and point.tokens:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens * point.width <= 1000 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.dtype == torch.float32 and point.tokens and point.width in {7, 64}:
        names.add("act-gate-up-swapped")
    if point.dtype == torch.float16 and point.is_large and point.gate != "swiglu_clamped":
        names.add("fp16-overflow-to-inf")
    if point.dtype == torch.float32 and point.gate == "swiglu_clamped" and (point.is_large or point.width == 1536):
        names |= {"act-clamp-dropped", "act-clamp-both-sides"}
    return frozenset(names)


def build(point: Point, draw: Draw) -> Trial:
    x = draw.normal(point.tokens, 2 * point.width, std=3.0, mean=0.3, dtype=point.dtype)
    if point.is_large:
        x = draw.uniform(point.tokens, 2 * point.width, low=-LARGE, high=LARGE, dtype=point.dtype)
    elif point.tokens:
        x[0, : point.width // 2] *= 2.0**-6
    gap = point.gap
    tensors = (
        given("x", x, strides=row_strides(x.shape, gap) if gap else None),
        wanted(
            "out",
            (point.tokens, point.width),
            point.dtype,
            strides=row_strides((point.tokens, point.width), gap) if gap else None,
            may_be_zero=point.is_large and point.tokens * point.width <= 32,  # a few gates may all be far below 0
        ),
    )

    def run(bench: Bench) -> None:
        bench.op("act_mul", point.spec)(bench["x"], out=bench["out"], gate=point.gate)

    def check(outputs: Outputs) -> list[Finding]:
        pair = rows.act_mul(x, point.gate)
        bound = gate_bound(pair.out, pair.gate * pair.up, dtype=point.dtype)
        return [statistical("out", outputs["out"], pair.out, bound)]

    return Trial(tensors, run, check, is_empty=point.tokens == 0)
