"""Rotary embedding: full, partial and interleaved, over any table of cosines and sines.

Every scaling rule (linear, NTK, YaRN, per-band, long and short factors) ends as a table, so a kernel can't tell them
apart: one table of plain angles, one with an attention factor (|cos| > 1) and one of a slow base stand for them.
Positions come in any order, repeat, and pass 2^16. Heads lie inside a fused qkv row in some cases.
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
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import rotary_bound
from octavo.conformance.oracle import rows
from octavo.conformance.trial import HostTensor, Outputs, Trial, given, updated, wanted
from octavo.core.backend import RowSpec

TABLES = {"plain": (10_000.0, 1.0), "factor": (10_000.0, 1.34), "slow": (1e6, 1.0)}
"""Kind of table -> base, factor. Never written to."""


@dataclass(frozen=True)
class Point:
    """q [T, H, D] and k [T, K, D]; the first `rotary_dim` elements of a head turn.

    Attributes:
        heads: H, K.
        gap: elements between the rows of q and k, as in a fused qkv row.
        positions: rows of the table.
    """

    dtype: torch.dtype
    tokens: int
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int
    is_interleaved: bool = False
    gap: int = 0
    is_in_place: bool = False
    table: str = "plain"
    positions: int = 300

    @property
    def name(self) -> str:
        shape = f"{self.tokens}x{self.heads[0]}.{self.heads[1]}x{self.head_dim}"
        parts = [dtype_name(self.dtype), shape, f"r{self.rotary_dim}"]
        parts += ["interleaved"] if self.is_interleaved else []
        parts += [f"gap{self.gap}"] if self.gap else []
        parts += ["inplace"] if self.is_in_place else []
        parts += [self.table] if self.table != "plain" else []
        return "-".join(parts + ([f"p{self.positions}"] if self.positions != 300 else []))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.head_dim, self.dtype, "interleaved" if self.is_interleaved else "", self.rotary_dim)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=f"rotary/{point.name}",
            op="rotary",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "head_dim": str(point.head_dim),
                "rotary_dim": str(point.rotary_dim),
                "pairs": "interleaved" if point.is_interleaved else "halves",
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("statistical",) if point.rotary_dim == point.head_dim else ("statistical", "exact"),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for is_interleaved in (False, True):
            at = functools.partial(Point, dtype, is_interleaved=is_interleaved)
            for dim in (32, 64, 80, 96, 112, 128, 256):
                yield at(5, (4, 2), dim, dim)
            for dim, rotary_dim in ((64, 16), (80, 32), (128, 64), (128, 2), (192, 64)):
                yield at(5, (3, 1), dim, rotary_dim)
            yield at(5, (4, 2), 64, 64, gap=136)
            yield at(5, (4, 2), 64, 32, gap=8)
            yield at(5, (4, 2), 64, 64, is_in_place=True)
            for table in TABLES:
                yield at(17, (2, 2), 64, 64, table=table)
        yield Point(dtype, 0, (4, 2), 64, 64)
        yield Point(dtype, 1, (9, 3), 64, 64)
        yield Point(dtype, 129, (3, 1), 64, 64)
        yield Point(dtype, 7, (2, 1), 8, 8, positions=70_001)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.head_dim == 64 and point.tokens == 5:
        names.add("smoke")
    if point.tokens == 5 and point.head_dim in {32, 64} and not point.gap:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens <= 17 and point.positions == 300 else set()))


def _faults(point: Point) -> frozenset[str]:
    names = set()
    if point.dtype == torch.float32 and point.tokens == 5 and point.head_dim == 64:
        if point.is_interleaved:
            names.add("rotary-interleaved-wrong")
        if point.rotary_dim < point.head_dim:
            names.add("rotary-partial-tail")
    return frozenset(names)


def cos_sin_table(positions: int, rotary_dim: int, kind: str) -> torch.Tensor:
    """[P, R] fp32: cosines, then sines, of position · base^(-2i / R), times a factor."""
    base, factor = TABLES[kind]
    speeds = base ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * speeds
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).float()


def build(point: Point, draw: Draw) -> Trial:
    shapes = {"q": (point.tokens, point.heads[0], point.head_dim), "k": (point.tokens, point.heads[1], point.head_dim)}
    inputs = {name: draw.normal(*shape, dtype=point.dtype) for name, shape in shapes.items()}
    table = cos_sin_table(point.positions, point.rotary_dim, point.table)
    positions = draw.integers(0, point.positions - 1, point.tokens, dtype=torch.int64)
    if point.tokens > 2:
        positions[0], positions[-1] = point.positions - 1, positions[1]
    outputs = {name: name if point.is_in_place else f"out_{name}" for name in inputs}

    def run(bench: Bench) -> None:
        bench.op("rotary", point.spec)(
            bench["q"],
            bench["k"],
            bench["positions"],
            bench["cos_sin"],
            out_q=bench[outputs["q"]],
            out_k=bench[outputs["k"]],
            interleaved=point.is_interleaved,
        )

    def check(got: Outputs) -> list[Finding]:
        findings = []
        for name, x in inputs.items():
            want, size = rows.rotary(x, positions, table, is_interleaved=point.is_interleaved)
            out, turned = got[outputs[name]], point.rotary_dim
            bound = rotary_bound(want[..., :turned], size[..., :turned], dtype=point.dtype)
            findings.append(statistical(outputs[name], out[..., :turned], want[..., :turned], bound))
            if turned < point.head_dim:
                findings.append(exact(outputs[name], out[..., turned:], want[..., turned:]))
        return findings

    tensors = [given("positions", positions), given("cos_sin", table)]
    for name, x in inputs.items():
        tensors += _placed(point, name, x)
    return Trial(tuple(tensors), run, check, is_empty=point.tokens == 0)


def _placed(point: Point, name: str, x: torch.Tensor) -> list[HostTensor]:
    """A gap lies between tokens; a token's heads are dense, as in a fused qkv row."""
    heads, dim = x.shape[1:]
    strides = (heads * dim + point.gap, dim, 1) if point.gap else None
    if point.is_in_place:
        return [updated(name, x, strides=strides)]
    return [given(name, x, strides=strides), wanted(f"out_{name}", x.shape, x.dtype, strides=strides)]
