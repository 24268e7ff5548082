"""Products over plain weights: the exact lane and the statistical one, with every epilogue.

    gemm.exact/…        integers that climb past 2^13 and cancel: any order of summation gives the same bits
    gemm.statistical/…  normal numbers with a positive mean, and a large K

M takes every value around the tiles that kernels use; N and K are no multiples of anything. Weights come in two parts,
as the loader streams them, and rows of x and out lie apart in some cases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import get_args

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
from octavo.conformance.trial import HostTensor, HostWeight, Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import Epilogue, Gate, GemmSpec, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Point:
    """A point of the family's grid: x [M, K] in `dtype`, weight [N, K] in `stored`."""

    lane: str
    m: int
    n: int
    k: int
    dtype: torch.dtype = F32
    stored: torch.dtype = F32
    has_bias: bool = False
    has_residual: bool = False
    gate: Gate | None = None
    gap: int = 0

    @property
    def epilogue(self) -> str:
        parts = ["bias"] if self.has_bias else []
        parts += [self.gate] if self.gate else []
        return "+".join(parts + (["residual"] if self.has_residual else [])) or "none"

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.stored == self.dtype else f".{dtype_name(self.stored)}")
        tail = ("" if self.epilogue == "none" else f"-{self.epilogue}") + (f"-gap{self.gap}" if self.gap else "")
        return f"gemm.{self.lane}/{dtypes}-m{self.m}-n{self.n}-k{self.k}{tail}"

    @property
    def spec(self) -> GemmSpec:
        return GemmSpec(
            WeightSpec(self.n, self.k, self.stored, gated=self.gate is not None),
            self.dtype,
            self.dtype,
            bias=self.has_bias,
            residual=self.has_residual,
            gate=self.gate,
        )

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.m, self.n // 2 if self.gate else self.n


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": dtype_name(point.stored),
                "m": str(point.m),
                "k": str(point.k),
                "epilogue": point.epilogue,
                "stride": "strided" if point.gap else "dense",
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=all_of(computes_in(point.dtype), stores_weights_in(point.stored)),
        )


def _points() -> Iterable[Point]:
    for dtype, stored in ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16), (F32, F16)):
        exact_at = functools.partial(Point, "exact", dtype=dtype, stored=stored)
        normal_at = functools.partial(Point, "statistical", dtype=dtype, stored=stored)
        for m in (0, 1, 2, 3, 4, 7, 8, 16, 17, 63, 64, 65, 128):
            yield exact_at(m, 48, 100)
        yield exact_at(4096, 24, 40)
        for k in (1, 2, 15, 16, 17, 31, 33, 48, 127, 129, 160, 255, 256, 257, 384, 1000, 4099):
            yield exact_at(5, 33, k)
        for n in (1, 15, 16, 31, 65, 257):
            yield exact_at(3, n, 96)
        for has_bias, has_residual in ((True, False), (False, True), (True, True)):
            yield exact_at(17, 48, 100, has_bias=has_bias, has_residual=has_residual)
        for gate in get_args(Gate):
            if gate != "swiglu_clamped":  # whose results are no integers
                yield exact_at(17, 96, 100, gate=gate)
            yield normal_at(9, 96, 130, gate=gate)
        yield exact_at(17, 96, 100, gate="silu", has_residual=True)
        yield normal_at(9, 96, 130, gate="silu", has_bias=True)
        yield exact_at(17, 48, 100, gap=12)
        yield normal_at(1, 64, 576)
        yield normal_at(33, 130, 576, has_bias=True, has_residual=True)
        yield normal_at(4, 32, 8192)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"}
    if point.m in {1, 17, 33} or point.k == 257:
        names.add("smoke")
    if point.m * point.n * point.k <= 20_000:
        names.add("tiny")
    if point.m * point.n * point.k <= 200_000:
        names.add("tiny-full")
    return frozenset(names)


def _faults(point: Point) -> frozenset[str]:
    """Named by the exact lane in fp32, where nothing is left to rounding; fp16 overflows in fp16 alone."""
    if point.lane != "exact" or not point.m:
        return frozenset()
    if point.dtype == F16:
        return frozenset({"fp16-overflow-to-inf"} if point.k == 1000 else ())
    if point.dtype != F32 or point.stored != F32 or point.gate or point.gap:
        return frozenset()
    names = {
        "gemm-k-not-multiple-16": point.k in {17, 100, 257},
        "gemm-k-not-multiple-32": point.k == 48,
        "gemm-k-not-multiple-128": point.k == 160,
        "gemm-k-not-multiple-256": point.k == 384,
        "gemm-16-bit-accumulator": point.k in {100, 1000} and point.epilogue == "none",
        "gemm-bias-dropped": point.has_bias,
        "weight-lost-after-one-product": point.m == 1,
        "gemm-residual-dropped": point.has_residual,
        "gemm-row-tail-uninitialised": point.m in {17, 65},
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build_exact(point: Point, draw: Draw) -> Trial:
    """Integers; the budget of |c| is shared by product, bias and residual."""
    bits = min(OUTPUT_BITS[point.dtype], 12)
    delta = _gated_delta(point, draw) if point.gate else None
    operands = min(OUTPUT_BITS[point.dtype], OUTPUT_BITS[point.stored], 9)
    drawn = product(draw, point.m, point.n, point.k, limit=2 ** (bits - 1), operand_bits=operands, delta_NJ=delta)
    quarter = 2 ** (bits - 2)
    bias = draw.integers(-quarter, quarter, point.n) if point.has_bias else None
    residual = draw.integers(-quarter, quarter, *point.out_shape, dtype=point.dtype) if point.has_residual else None
    x, w = drawn.x_MK.to(point.dtype), drawn.w_NK.to(point.stored)

    def check(outputs: Outputs) -> list[Finding]:
        want = oracle.gemm(x, w, bias_N=bias, gate=point.gate, residual=residual).out
        # Gates are ≥ 32 or ≤ -128, where fp32 has act(g) = g or 0: round what float64 leaves of e^-128.
        return [exact("out", outputs["out"], want.to(F32).round())]

    return _trial(point, x, w, bias, residual, check)


def _gated_delta(point: Point, draw: Draw) -> torch.Tensor:
    """[gate; up] rows: gates of 32·{1, 2} or -128·{1, 2}, ups of ±{1, 2}, so that |out| ≤ 128."""
    half, columns = point.n // 2, len(signal_columns(point.k))
    delta = torch.zeros(point.n, columns)
    delta[:half, 0] = torch.where(draw.integers(0, 3, half) > 0, 32.0, -128.0)
    delta[half:, columns - 1] = draw.signs(point.n - half)
    return delta


def build_statistical(point: Point, draw: Draw) -> Trial:
    """Normal numbers of positive mean: sums grow with K, which is hardest on the accumulator."""
    x = draw.normal(point.m, point.k, mean=0.1, dtype=point.dtype)
    w = draw.normal(point.n, point.k, mean=0.02, std=point.k**-0.5, dtype=point.stored)
    bias = draw.normal(point.n) if point.has_bias else None
    residual = draw.normal(*point.out_shape, dtype=point.dtype) if point.has_residual else None

    def check(outputs: Outputs) -> list[Finding]:
        want = oracle.gemm(x, w, bias_N=bias, gate=point.gate, residual=residual)
        bound = product_bound(
            want.out,
            want.squares,
            inner=point.k,
            dtype=point.dtype,
            accumulation=draw.accumulation,
            slope=want.slope,
            x_dtype=point.dtype,
        )
        return [statistical("out", outputs["out"], want.out, bound)]

    return _trial(point, x, w, bias, residual, check)


def _trial(
    point: Point,
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    check: Callable[[Outputs], list[Finding]],
) -> Trial:
    strides = row_strides(x.shape, point.gap) if point.gap else None
    out_strides = row_strides(point.out_shape, point.gap) if point.gap else None
    tensors: list[HostTensor] = [
        given("x", x, strides=strides),
        wanted("out", point.out_shape, point.dtype, strides=out_strides),
    ]
    tensors += [given("bias", bias)] if bias is not None else []
    tensors += [given("residual", residual)] if residual is not None else []
    return Trial(tuple(tensors), functools.partial(_run, point), check, (_streamed(point, w),), is_empty=point.m == 0)


def _streamed(point: Point, w: torch.Tensor) -> HostWeight:
    """The weight in two parts; gate and up for a gated one."""
    cut = point.n // 2
    parts = ((w[:cut], 0), (w[cut:], cut)) if cut else ((w, 0),)
    return HostWeight("w", point.spec, parts)


def _run(point: Point, bench: Bench) -> None:
    epilogue = Epilogue(
        bias_N=bench["bias"] if point.has_bias else None,
        gate=point.gate,
        residual=bench["residual"] if point.has_residual else None,
    )
    bench.op("gemm", point.spec)(bench["x"], bench.weight("w"), out=bench["out"], epilogue=epilogue)
