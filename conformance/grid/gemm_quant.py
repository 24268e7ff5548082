"""Products over quantised weights: value = (code - zero point) · scale, per tensor, row or group along K.

    gemm.quantised.exact/…        integers and power-of-two scales: any order of summation gives the same bits
    gemm.quantised.statistical/…  normal weights, scales of any mantissa, what a checkpoint holds

The exact lane has two fills:

    dense    x full, out fp32       Σ|x·v|·scale ≤ 2^acc units: v = code - zero point takes every code and zero point
    cover    out of 16 bits         each column of K is non-zero in exactly one row of x, so that every (n, k) of the
                                    weight reaches some output, and |c| ≤ 2^8 units holds without any cancellation

A wrong, stale or swapped scale or zero point can't hide: neighbouring groups and rows never share a scale, and nothing
cancels. Quantised activations (dense only): each row of x holds its largest code times 2^k, so that quantising it is
exact. A 128 × 128 block scale is a group of 128 whose scales repeat over 128 rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import OUTPUT_BITS, exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import UNIT, product_bound
from octavo.conformance.oracle import product as oracle
from octavo.conformance.oracle import quantise
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, wanted
from octavo.core.backend import GemmSpec, QuantFormat, QuantizedTensor, QuantScheme, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, INT4, FP8, FNUZ = QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ
CODES = {INT8: (-127, 127), INT4: (-8, 7), FP8: (-16, 16), FNUZ: (-16, 16)}
"""Codes of symmetric schemes; of fp8 those that are integers and all representable. Never written to."""

UNSIGNED = {INT8: (0, 127), INT4: (0, 15)}
"""Codes and zero points of schemes that have them: all of int4's. Never written to."""

SPREAD = 2
"""Scales are 2^0 … 2^-SPREAD."""

ACTIVATION_TOP = {INT8: 127, FP8: 14, FNUZ: 15}
"""The largest |x|: a power of two times the format's largest code. Never written to."""


@dataclass(frozen=True)
class Point:
    """x [M, K] in `dtype`, codes [N, K]; block_rows: rows that share their scales."""

    lane: str
    scheme: QuantScheme
    m: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    block_rows: int = 1

    @property
    def name(self) -> str:
        scheme = self.scheme
        granularity = {0: "row", -1: "tensor"}.get(scheme.group_size, f"g{scheme.group_size}")
        if self.block_rows > 1:
            granularity = f"{self.block_rows}x{scheme.group_size}"
        kind = [str(scheme.format), granularity] + ([] if scheme.symmetric else ["zp"])
        kind += [f"a.{scheme.activation}"] if scheme.activation else []
        dtypes = dtype_name(self.dtype) + ("" if self.out_dtype == self.dtype else f".{dtype_name(self.out_dtype)}")
        return f"gemm.quantised.{self.lane}/{'-'.join(kind)}-{dtypes}-m{self.m}-n{self.n}-k{self.k}"

    @property
    def spec(self) -> GemmSpec:
        return GemmSpec(WeightSpec(self.n, self.k, self.dtype, self.scheme), self.dtype, self.out_dtype)

    @property
    def scale_shape(self) -> tuple[int, int]:
        groups = self.k // self.scheme.group_size if self.scheme.group_size > 0 else 1
        return (1, 1) if self.scheme.group_size == -1 else (self.n, groups)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        scheme = point.scheme
        yield Case(
            name=point.name,
            op="gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": str(scheme.format) + ("" if scheme.symmetric else "+zp"),
                "group": str(scheme.group_size) if point.block_rows == 1 else f"{point.block_rows}x{scheme.group_size}",
                "activation": str(scheme.activation or "plain"),
                "m": str(point.m),
                "k": str(point.k),
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _schemes() -> Iterable[tuple[QuantScheme, int]]:
    """Schemes and the rows that share a scale."""
    for symmetric in (True, False):
        for group_size in (32, 64, 128, 0, -1):
            yield QuantScheme(INT4, group_size, symmetric), 1
        yield QuantScheme(INT8, 0, symmetric), 1
    yield QuantScheme(INT4, 256), 1
    yield QuantScheme(INT8, -1), 1
    yield QuantScheme(INT8, 128), 1
    for quant_format in (FP8, FNUZ):
        yield QuantScheme(quant_format, -1), 1
        yield QuantScheme(quant_format, 0), 1
        yield QuantScheme(quant_format, 128), 1
        yield QuantScheme(quant_format, 128), 128


def _points() -> Iterable[Point]:
    for scheme, block_rows in _schemes():
        for dtype in (F32, BF16, F16):
            at = functools.partial(Point, scheme=scheme, dtype=dtype, block_rows=block_rows)
            n = 160 if block_rows > 1 else 48
            yield at("exact", m=3, n=n, k=512, out_dtype=F32)
            if dtype != F32:
                yield at("exact", m=128, n=n, k=512, out_dtype=dtype)
            yield at("statistical", m=17, n=n, k=512, out_dtype=dtype)
    for weight, activation in ((INT8, INT8), (INT4, INT8), (FP8, FP8), (FNUZ, FNUZ)):
        for dtype, ms in ((F32, (17,)), (BF16, (1, 17, 65))):
            for m in ms:
                yield Point("exact", QuantScheme(weight, 0, activation=activation), m, 48, 256, dtype, F32)
    for m in (0, 1, 2, 8, 16, 33, 64, 65):
        yield Point("exact", QuantScheme(INT4, 32, symmetric=False), m, 33, 64, F32, F32)


def _profiles(point: Point) -> frozenset[str]:
    names = {"quant", "deterministic"}
    # The contract's own semantics on small shapes, for interpreters and for whoever begins.
    return frozenset(names | ({"tiny-full"} if point.m * point.n * point.k <= 200_000 else set()))


def _faults(point: Point) -> frozenset[str]:
    scheme, names = point.scheme, set()
    if point.lane != "exact" or point.m not in {3, 33} or point.dtype != F32:
        return frozenset()
    if scheme.format is INT4 and not scheme.symmetric and scheme.group_size >= 0:
        names.add("int4-zero-point-wrapped")
        if scheme.group_size == 32:
            names.add("int4-zero-point-stale-at-32")
    if scheme.group_size == 256:
        names.add("group-size-256")
    if scheme.group_size in {0, 128}:
        names.add("row-scales-as-block-scales")
    return frozenset(names)


def build_exact(point: Point, draw: Draw) -> Trial:
    low, high = CODES[point.scheme.format] if point.scheme.symmetric else UNSIGNED[point.scheme.format]
    is_cover = point.out_dtype != F32
    if is_cover:
        # ceil(K / M) terms of |v| · 2^SPREAD units each share the output's integers; with zero points |v| ≤ high.
        most = 2 ** OUTPUT_BITS[point.out_dtype] // (-(-point.k // point.m) * 2**SPREAD)
        low, high = max(low, -min(most, high)), min(most, high)
    codes = draw.integers(low, high, point.n, point.k)
    zero_points = None if point.scheme.symmetric else _zero_points(point, draw, low, high)
    weight = QuantizedTensor(point.scheme, codes.to(point.scheme.format.code_dtype), _scales(point, draw), zero_points)
    if is_cover:
        x = _cover(point, draw)
    else:
        x = _dense(point, draw, max(abs(low), high))

    def check(outputs: Outputs) -> list[Finding]:
        return [exact("out", outputs["out"], oracle.gemm(x, _dequantised(weight)).out)]

    return _trial(point, x, weight, check)


def _zero_points(point: Point, draw: Draw, low: int, high: int) -> torch.Tensor:
    """Every zero point low .. high in turn, from a random one on: neighbours always differ."""
    count = math.prod(point.scale_shape)
    first = draw.integers(low, high, 1)
    return ((torch.arange(count) + first) % (high - low + 1) + low).reshape(point.scale_shape).float()


def _scales(point: Point, draw: Draw) -> torch.Tensor:
    """Powers of two: neighbours in a row and in a column of the weight differ."""
    rows, groups = point.scale_shape
    steps = torch.arange(rows)[:, None] // point.block_rows + torch.arange(groups)[None, :]
    return torch.exp2(-((steps + draw.integers(0, SPREAD, 1)) % (SPREAD + 1)))


def _dense(point: Point, draw: Draw, largest: int) -> torch.Tensor:
    """Whole x, as large as the accumulator's budget Σ|x·v|·2^SPREAD ≤ 2^bits allows, never 0 but for want of budget."""
    budget = 2**draw.accumulation.bits // (largest * 2**SPREAD)
    if point.scheme.activation is None:
        top, columns = max(1, min(127, budget // point.k)), min(point.k, budget)
    else:
        top = ACTIVATION_TOP[point.scheme.activation]
        columns = max(1, min(point.k, budget // top))
    x = draw.integers(1, top, point.m, point.k) * draw.signs(point.m, point.k)
    for row in range(point.m):
        order = draw.permutation(point.k)
        x[row, order[columns:]] = 0
        x[row, order[0]] = top
    if point.scheme.activation is not None:
        # Rows of different sizes: their scales are part of the answer. Dynamic scales divide them out exactly.
        x *= torch.exp2(draw.integers(0, 1, point.m, 1)) if top * 2 < 2 ** OUTPUT_BITS[point.dtype] else 1
    return x.to(point.dtype)


def _cover(point: Point, draw: Draw) -> torch.Tensor:
    """±1 in each column of exactly one row."""
    x = torch.zeros(point.m, point.k)
    owner = torch.tensor(draw.permutation(point.k)) % point.m
    x[owner, torch.arange(point.k)] = draw.signs(point.k)
    return x.to(point.dtype)


def build_statistical(point: Point, draw: Draw) -> Trial:
    """Normal weights as a quantiser leaves them, with zero points off the middle."""
    plain = draw.normal(point.n, point.k, std=point.k**-0.5, mean=0.2 * point.k**-0.5)
    values, scales = quantise.quantise(plain, point.scheme.format, point.scheme.group_size)
    zero_points = None
    if not point.scheme.symmetric:
        low, high = UNSIGNED[point.scheme.format]
        zero_points = draw.integers(low + (high - low) // 3, high - (high - low) // 3, *point.scale_shape)
        spread = zero_points.repeat_interleave(point.k // point.scale_shape[1], dim=1)
        values = (values + spread).clamp(low, high)
    codes = values.float().to(point.scheme.format.code_dtype)
    weight = QuantizedTensor(point.scheme, codes, scales.float().reshape(point.scale_shape), zero_points)
    x = draw.normal(point.m, point.k, mean=0.1, dtype=point.dtype)

    def check(outputs: Outputs) -> list[Finding]:
        want = oracle.gemm(x, _dequantised(weight))
        bound = product_bound(
            want.out,
            want.squares,
            inner=point.k,
            dtype=point.out_dtype,
            accumulation=draw.accumulation,
            x_dtype=point.dtype,
            # A kernel may multiply weights as it dequantised them, in x's dtype.
            operand_unit=UNIT[point.dtype],
        )
        return [statistical("out", outputs["out"], want.out, bound)]

    return _trial(point, x, weight, check)


def _dequantised(weight: QuantizedTensor) -> torch.Tensor:
    """[N, K] in float64, by the oracle's own table of codes."""
    n, k = weight.codes_NK.shape
    groups = weight.scales.shape[1]
    values = quantise.decode(weight.codes_NK).reshape(n, groups, -1)
    if weight.zero_points is not None:
        values = values - weight.zero_points.double()[..., None]
    return (values * weight.scales.double()[..., None]).reshape(n, k)


def _trial(point: Point, x: torch.Tensor, weight: QuantizedTensor, check: Callable[[Outputs], list[Finding]]) -> Trial:
    """The weight comes in one part where a scale is the whole tensor's, else in two."""
    cut = point.n // 2
    parts = ((weight, 0),) if point.scheme.group_size == -1 else ((_rows(weight, 0, cut), 0), (_rows(weight, cut), cut))

    def run(bench: Bench) -> None:
        bench.op("gemm", point.spec)(bench["x"], bench.weight("w"), out=bench["out"])

    tensors = (given("x", x), wanted("out", (point.m, point.n), point.out_dtype))
    return Trial(tensors, run, check, (HostWeight("w", point.spec, parts),), is_empty=point.m == 0)


def _rows(weight: QuantizedTensor, first: int, end: int | None = None) -> QuantizedTensor:
    zero_points = None if weight.zero_points is None else weight.zero_points[first:end]
    return QuantizedTensor(weight.scheme, weight.codes_NK[first:end], weight.scales[first:end], zero_points)
