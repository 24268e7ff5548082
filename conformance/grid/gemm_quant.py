"""Products over quantised weights: integers, 8-bit floats, MXFP4, GGUF's blocks; plain or quantised activations.

    gemm.quantised.exact/…        integers and power-of-two scales: any order of summation gives the same bits
    gemm.quantised.statistical/…  normal weights, scales of any mantissa, what a checkpoint holds

The exact lane has two fills:

    dense    x full, out fp32       Σ|x|·largest ≤ 2^acc units: codes, zero points and minimums take every value
    cover    out of 16 bits         each column of K is non-zero in exactly one row of x, so that every (n, k) of the
                                    weight reaches some output, and |c| ≤ 2^8 units holds without any cancellation

A wrong, stale, swapped or transposed scale, zero point or minimum can't hide: neighbours never share one, and nothing
cancels (quant_weights.py, gguf_weights.py). Weights come in two parts, each with scales of its own; where 128 rows
share them, N and K are no multiples of 128. Quantised activations (dense only): each group of x holds its largest code
times 2^k, so that quantising it is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, Requirement, all_of, always, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts, dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.quant_weights import SPREAD, Drawn, cover_x, dense_x, exact_weight, typical_weight
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.accumulation import FP32, accumulation
from octavo.conformance.lanes.exact import OUTPUT_BITS, exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import UNIT, product_bound
from octavo.conformance.oracle import product as oracle
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, wanted
from octavo.core.backend import GemmSpec, QuantFormat, QuantScheme, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, INT4, FP8, FNUZ = QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ
MXFP4 = QuantScheme(QuantFormat.MXFP4, 32)
GGUF = tuple(QuantScheme(f) for f in QuantFormat if f.block is not None)
RAGGED = {"n": 328, "k": 320}
"""Parts of 128 and of 128 + 72 rows, 2 · 128 + 64 columns: the grid of scales is no square."""


@dataclass(frozen=True)
class Point:
    """x [M, K] in `dtype`, a weight [N, K]."""

    lane: str
    scheme: QuantScheme
    m: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.out_dtype == self.dtype else f".{dtype_name(self.out_dtype)}")
        return f"gemm.quantised.{self.lane}/{scheme_name(self.scheme)}-{dtypes}-m{self.m}-n{self.n}-k{self.k}"

    @property
    def spec(self) -> GemmSpec:
        return GemmSpec(WeightSpec(self.n, self.k, self.dtype, self.scheme), self.dtype, self.out_dtype)


def group_name(scheme: QuantScheme) -> str:
    """The granularity of a scheme: "row", "tensor", "g32", "128x128", "block"."""
    if scheme.format.block is not None:
        return "block"
    if scheme.block_rows > 1:
        return f"{scheme.block_rows}x{scheme.group_size}"
    return {0: "row", -1: "tensor"}.get(scheme.group_size, f"g{scheme.group_size}")


def scheme_name(scheme: QuantScheme) -> str:
    """A scheme in a case's name."""
    parts = [str(scheme.format)] + ([] if scheme.format.block is not None else [group_name(scheme)])
    parts += [] if scheme.symmetric else ["zp"]
    if scheme.activation is not None:
        group = f".g{scheme.activation_group_size}" if scheme.activation_group_size else ""
        parts.append(f"a.{scheme.activation}{group}")
    return "-".join(parts)


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
                "group": group_name(scheme),
                "activation": str(scheme.activation or "plain"),
                "m": str(point.m),
                "k": str(point.k),
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=all_of(computes_in(point.dtype), _adds_up(point)),
        )


def _schemes() -> Iterable[tuple[QuantScheme, dict[str, int]]]:
    """Schemes over plain activations, and N and K where they matter."""
    for symmetric in (True, False):
        for group_size in (32, 64, 128, 0, -1):
            yield QuantScheme(INT4, group_size, symmetric), {}
        yield QuantScheme(INT8, 0, symmetric), {}
    yield QuantScheme(INT4, 256), {}
    yield QuantScheme(INT4, 128, symmetric=False), {"k": 320}
    yield QuantScheme(INT8, -1), {}
    yield QuantScheme(INT8, 128), {}
    for quant_format in (FP8, FNUZ):
        yield QuantScheme(quant_format, -1), {}
        yield QuantScheme(quant_format, 0), {}
        yield QuantScheme(quant_format, 128), {}
        yield QuantScheme(quant_format, 128, block_rows=128), RAGGED
    yield QuantScheme(INT8, 128, block_rows=128), RAGGED
    yield MXFP4, {}
    for scheme in GGUF:
        yield scheme, {"n": 24}


def _points() -> Iterable[Point]:
    for scheme, sizes in _schemes():
        for dtype in (F32, BF16, F16):
            n, k = sizes.get("n", 48), sizes.get("k", 512)
            at = functools.partial(Point, scheme=scheme, dtype=dtype, n=n)
            yield at("exact", m=3, k=k, out_dtype=F32)
            if scheme.format.block is None and dtype != F32:
                yield at("exact", m=128, k=k, out_dtype=dtype)
            if scheme.format.block is not None and dtype == BF16:
                yield at("exact", m=256, k=256, out_dtype=dtype)
            yield at("statistical", m=17, k=k, out_dtype=dtype)
    for scheme in _over_quantised_activations():
        for dtype, ms in ((F32, (17,)), (BF16, (1, 17, 65))):
            sizes = RAGGED if scheme.block_rows > 1 else {"n": 48, "k": 256}
            for m in ms:
                yield Point("exact", scheme, m, dtype=dtype, out_dtype=F32, **sizes)
    for m in (0, 1, 2, 8, 16, 33, 64, 65):
        yield Point("exact", QuantScheme(INT4, 32, symmetric=False), m, 33, 64, F32, F32)
    for m in (0, 1, 33):
        yield Point("exact", MXFP4, m, 33, 64, F32, F32)
        yield Point("exact", QuantScheme(QuantFormat.GGUF_Q4_K), m, 15, 256, F32, F32)
        yield Point("exact", QuantScheme(FP8, 128, block_rows=128), m, 129, 130, F32, F32)


def _over_quantised_activations() -> Iterable[QuantScheme]:
    for weight, activation in ((INT8, INT8), (INT4, INT8), (FP8, FP8), (FNUZ, FNUZ)):
        yield QuantScheme(weight, 0, activation=activation)
    yield QuantScheme(INT8, 0, symmetric=False, activation=INT8)
    yield QuantScheme(FP8, -1, activation=FP8)
    yield QuantScheme(INT4, 32, symmetric=False, activation=INT8, activation_group_size=32)
    for quant_format in (FP8, FNUZ):
        yield QuantScheme(quant_format, 128, activation=quant_format, block_rows=128, activation_group_size=128)
    for block_format in (QuantFormat.GGUF_Q8_0, QuantFormat.GGUF_Q4_K):
        yield QuantScheme(block_format, activation=INT8, activation_group_size=32)


def _adds_up(point: Point) -> Requirement:
    """A GGUF block's values have up to 14 bits, and the largest of int8's codes 7 more, which a term must keep."""
    if point.scheme.format.block is None or point.scheme.activation is None:
        return always

    def requirement(facts: Facts) -> str | None:
        declared = accumulation(facts.accumulation_of("gemm"))
        return None if declared.bits >= FP32.bits else f"it adds up in {declared.name}, which holds no such term"

    return requirement


def _profiles(point: Point) -> frozenset[str]:
    names = {"quant", "deterministic"}
    # The contract's own semantics on small shapes, for interpreters and for whoever begins.
    return frozenset(names | ({"tiny-full"} if point.m * point.n * point.k <= 200_000 else set()))


def _faults(point: Point) -> frozenset[str]:
    """Named in fp32, where nothing is left to rounding, over plain activations."""
    scheme = point.scheme
    if point.lane != "exact" or point.m not in {3, 33} or point.dtype != F32:
        return frozenset()
    size, quant_format = scheme.group_size, scheme.format
    zeros, blocks = quant_format is INT4 and not scheme.symmetric, quant_format.block
    names = {
        "int4-zero-point-wrapped": zeros and size >= 0,
        "int4-zero-point-stale-at-32": zeros and size == 32,
        "group-size-256": size == 256,
        "row-scales-as-block-scales": blocks is None and size in {0, 128} and scheme.block_rows == 1,
        "block-scales-as-row-scales": scheme.block_rows > 1,
        "block-scales-transposed": scheme.block_rows > 1 and point.n > 2 * scheme.block_rows,
        "mxfp4-exponent-off-by-one": scheme == MXFP4,
        "mxfp4-sign-lost": scheme == MXFP4,
        "gguf-minimum-ignored": quant_format.name.endswith(("_1", "4_K", "5_K")) and blocks is not None,
        "gguf-scale-stale": quant_format.name.endswith("_K"),
        "gguf-high-bits-dropped": "Q5" in quant_format.name or "Q6" in quant_format.name,
    }
    return frozenset(name for name, is_named in names.items() if is_named)


def build_exact(point: Point, draw: Draw) -> Trial:
    is_cover, most = point.out_dtype != F32, None
    if is_cover:
        # ceil(K / M) terms of |v| · 2^SPREAD units each share the output's integers.
        most = 2 ** OUTPUT_BITS[point.out_dtype] // (-(-point.k // point.m) * 2**SPREAD)
    weight = exact_weight(point.scheme, point.n, point.k, draw, dtype=point.dtype, most=most)
    if is_cover:
        x = cover_x(point.m, point.k, draw, point.dtype)
    else:
        x = dense_x(point.scheme, point.m, point.k, draw, largest=weight.largest, dtype=point.dtype)

    def check(outputs: Outputs) -> list[Finding]:
        return [exact("out", outputs["out"], oracle.gemm(x, weight.dense()).out)]

    return _trial(point, x, weight, check)


def build_statistical(point: Point, draw: Draw) -> Trial:
    weight = typical_weight(point.scheme, point.n, point.k, draw)
    x = draw.normal(point.m, point.k, mean=0.1, dtype=point.dtype)

    def check(outputs: Outputs) -> list[Finding]:
        want = oracle.gemm(x, weight.dense())
        bound = product_bound(
            want.out,
            want.squares,
            inner=point.k,
            dtype=point.out_dtype,
            accumulation=draw.accumulation,
            x_dtype=point.dtype,
            # A kernel may multiply weights as it dequantised them, in x's dtype.
            operand_unit=UNIT[point.dtype],
            # Or the codes themselves, and take the zero points off afterwards.
            term_squares=weight.term_squares(x),
        )
        return [statistical("out", outputs["out"], want.out, bound)]

    return _trial(point, x, weight, check)


def _trial(point: Point, x: torch.Tensor, weight: Drawn, check: Callable[[Outputs], list[Finding]]) -> Trial:
    def run(bench: Bench) -> None:
        bench.op("gemm", point.spec)(bench["x"], bench.weight("w"), out=bench["out"])

    tensors = (given("x", x), wanted("out", (point.m, point.n), point.out_dtype))
    return Trial(tensors, run, check, (HostWeight("w", point.spec, weight.parts),), is_empty=point.m == 0)
