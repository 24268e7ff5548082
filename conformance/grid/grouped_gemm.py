"""Products of row segments with one weight each: experts without rows, with one, with fewer than a tile, with all.

    grouped_gemm.exact/…        integers that climb and cancel, as in gemm
    grouped_gemm.statistical/…  normal numbers, experts of very different sizes, so that a neighbour's weight stands out

Segments are named: "even" shares the rows out, "empty" leaves every other expert without, "one" gives all to one
expert, "ragged" deals them at random. With no rows at all nothing may fail.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import OUTPUT_BITS, exact, product, signal_columns
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import product_bound
from octavo.conformance.oracle import product as oracle
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import Gate, GroupedGemmSpec, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Point:
    """x [T, K], E weights [N, K]."""

    lane: str
    dtype: torch.dtype
    stored: torch.dtype
    experts: int
    tokens: int
    segments: str = "ragged"
    n: int = 32
    k: int = 100
    gate: Gate | None = None
    gap: int = 0

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.stored == self.dtype else f".{dtype_name(self.stored)}")
        parts = [dtypes, f"e{self.experts}", f"t{self.tokens}", self.segments, f"n{self.n}", f"k{self.k}"]
        parts += [self.gate] if self.gate else []
        parts += [f"gap{self.gap}"] if self.gap else []
        return f"grouped_gemm.{self.lane}/{'-'.join(parts)}"

    @property
    def spec(self) -> GroupedGemmSpec:
        weight = WeightSpec(self.n, self.k, self.stored, gated=self.gate is not None)
        return GroupedGemmSpec(weight, self.experts, self.dtype, self.dtype, self.gate)

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.tokens, self.n // 2 if self.gate else self.n


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="grouped_gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": dtype_name(point.stored),
                "experts": str(point.experts),
                "tokens": str(point.tokens),
                "segments": point.segments,
                "epilogue": point.gate or "none",
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=all_of(computes_in(point.dtype), stores_weights_in(point.stored)),
        )


def _points() -> Iterable[Point]:
    for dtype, stored in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16)):
        at = functools.partial(Point, "exact", dtype, stored)
        for tokens in (0, 1, 2, 3, 4, 5, 16, 17, 64, 65):
            yield at(8, tokens)
        for segments in ("even", "empty", "one"):
            yield at(8, 65, segments)
            yield at(60, 60, segments, n=16, k=40)
        yield at(1, 17)
        yield at(384, 20, n=8, k=16)
        for k in (16, 17, 48, 160, 257):
            yield at(4, 9, k=k)
        yield at(4, 9, gate="silu")
        yield at(4, 9, gap=12)
        normal = functools.partial(Point, "statistical", dtype, stored)
        yield normal(8, 65)
        yield normal(8, 33, "empty", gate="silu")
        yield normal(3, 9, "one", k=2048)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "moe", "deterministic"}
    if point.experts == 8 and point.tokens in {4, 65}:
        names.add("smoke")
    if point.experts <= 8 and point.tokens <= 9:
        names.add("tiny")
    return frozenset(names | ({"tiny-full"} if point.tokens * point.n * point.k <= 200_000 else set()))


def _faults(point: Point) -> frozenset[str]:
    if point.dtype != F32 or point.stored != F32 or point.lane != "exact" or point.experts != 8:
        return frozenset()
    names = {0: "moe-zero-tokens", 3: "moe-token-bucket-boundary", 4: "moe-token-bucket-boundary"}
    small = {"grouped-gemm-m-below-tile"} if point.tokens in {5, 17} else set()
    return frozenset(small | ({names[point.tokens]} if point.tokens in names else set()))


def segment_bounds(experts: int, tokens: int, segments: str, draw: Draw) -> list[int]:
    """E + 1 bounds of the rows."""
    if segments == "one":
        owners = [draw.permutation(experts)[0]] * tokens
    elif segments == "ragged":
        owners = sorted(draw.pick(range(experts)) for _ in range(tokens))
    else:
        step = 2 if segments == "empty" else 1
        owners = sorted(t * step % experts for t in range(tokens))
    counts = [owners.count(e) for e in range(experts)]
    return [sum(counts[:e]) for e in range(experts + 1)]


def build_exact(point: Point, draw: Draw) -> Trial:
    """One draw of E · N rows of weights for the same x: the experts' weights."""
    bits = min(OUTPUT_BITS[point.dtype], 12)
    operands = min(OUTPUT_BITS[point.dtype], OUTPUT_BITS[point.stored], 9)
    rows = point.experts * point.n
    delta = _gated_delta(point, draw) if point.gate else None
    drawn = product(draw, point.tokens, rows, point.k, limit=2 ** (bits - 1), operand_bits=operands, delta_NJ=delta)
    x, w = drawn.x_MK.to(point.dtype), drawn.w_NK.to(point.stored).view(point.experts, point.n, point.k)
    bounds = segment_bounds(point.experts, point.tokens, point.segments, draw)

    def check(outputs: Outputs) -> list[Finding]:
        pieces = [oracle.gemm(x[bounds[e] : bounds[e + 1]], w[e], gate=point.gate).out for e in range(point.experts)]
        # Gates are ≥ 32 or ≤ -128, where fp32 has silu(g) = g or 0: round what float64 leaves of e^-128.
        return [exact("out", outputs["out"], torch.cat(pieces).float().round())]

    return _trial(point, x, w, bounds, check)


def _gated_delta(point: Point, draw: Draw) -> torch.Tensor:
    """As in gemm, for each expert: gates of 32·{1, 2} or -128·{1, 2}, ups of ±{1, 2}."""
    half, columns = point.n // 2, len(signal_columns(point.k))
    delta = torch.zeros(point.experts, point.n, columns)
    delta[:, :half, 0] = torch.where(draw.integers(0, 3, point.experts, half) > 0, 32.0, -128.0)
    delta[:, half:, columns - 1] = draw.signs(point.experts, point.n - half)
    return delta.flatten(0, 1)


def build_statistical(point: Point, draw: Draw) -> Trial:
    x = draw.normal(point.tokens, point.k, mean=0.1, dtype=point.dtype)
    size = torch.exp2(draw.integers(-2, 2, point.experts, 1, 1))
    w = (draw.normal(point.experts, point.n, point.k, mean=0.02, std=point.k**-0.5) * size).to(point.stored)
    bounds = segment_bounds(point.experts, point.tokens, point.segments, draw)

    def check(outputs: Outputs) -> list[Finding]:
        spans = [slice(bounds[e], bounds[e + 1]) for e in range(point.experts)]
        pieces = [oracle.gemm(x[span], w[e], gate=point.gate) for e, span in enumerate(spans)]
        want = torch.cat([p.out for p in pieces])
        bound = product_bound(
            want,
            torch.cat([p.squares for p in pieces]),
            inner=point.k,
            dtype=point.dtype,
            accumulation=draw.accumulation,
            slope=torch.cat([p.slope for p in pieces if isinstance(p.slope, torch.Tensor)]) if point.gate else 1.0,
            x_dtype=point.dtype,
        )
        return [statistical("out", outputs["out"], want, bound)]

    return _trial(point, x, w, bounds, check)


def _trial(
    point: Point, x: torch.Tensor, w: torch.Tensor, bounds: list[int], check: Callable[[Outputs], list[Finding]]
) -> Trial:
    def run(bench: Bench) -> None:
        weights = [bench.weight(f"w{e}") for e in range(point.experts)]
        call = bench.op("grouped_gemm", point.spec)
        call(bench["x"], weights, bench["segment_start"], out=bench["out"], gate=point.gate)

    tensors = (
        given("x", x, strides=row_strides(x.shape, point.gap) if point.gap else None),
        given("segment_start", torch.tensor(bounds, dtype=torch.int32)),
        wanted(
            "out", point.out_shape, point.dtype, strides=row_strides(point.out_shape, point.gap) if point.gap else None
        ),
    )
    weights = tuple(HostWeight(f"w{e}", point.spec, ((w[e], 0),)) for e in range(point.experts))
    return Trial(tensors, run, check, weights, is_empty=point.tokens == 0)
