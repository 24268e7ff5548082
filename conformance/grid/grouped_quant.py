"""Products of row segments with quantised weights: mixtures of experts as they are shipped (MXFP4, fp8 blocks, GGUF).

    grouped_gemm.quantised.exact/…        integers and power-of-two scales, drawn anew for each expert
    grouped_gemm.quantised.statistical/…  weights as a checkpoint holds them, gated too

Grouped kernels unpack weights, and find an expert's scales, by code of their own: what gemm_quant shows of `gemm` says
nothing of them. Segments are ragged, some empty and some shorter than any tile. In a gated weight the blocks of 128
rows are counted in each half, and N / 2 is no multiple of 128.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.gemm_quant import MXFP4, group_name, scheme_name
from octavo.conformance.grid.grouped_gemm import segment_bounds
from octavo.conformance.grid.quant_weights import Drawn, dense_x, exact_weight, typical_weight
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import UNIT, product_bound
from octavo.conformance.oracle import product as oracle
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, wanted
from octavo.core.backend import Gate, GroupedGemmSpec, QuantFormat, QuantScheme, WeightSpec

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INT8, INT4, FP8, FNUZ = QuantFormat.INT8, QuantFormat.INT4, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ
EXPERTS = 5


@dataclass(frozen=True)
class Point:
    """x [T, K] in `dtype`, EXPERTS weights [N, K]."""

    lane: str
    scheme: QuantScheme
    dtype: torch.dtype
    out_dtype: torch.dtype
    tokens: int
    n: int
    k: int
    segments: str = "ragged"
    gate: Gate | None = None

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.out_dtype == self.dtype else f".{dtype_name(self.out_dtype)}")
        parts = [scheme_name(self.scheme), dtypes, f"t{self.tokens}", self.segments, f"n{self.n}", f"k{self.k}"]
        return f"grouped_gemm.quantised.{self.lane}/{'-'.join(parts)}" + (f"-{self.gate}" if self.gate else "")

    @property
    def spec(self) -> GroupedGemmSpec:
        weight = WeightSpec(self.n, self.k, self.dtype, self.scheme, gated=self.gate is not None)
        return GroupedGemmSpec(weight, EXPERTS, self.dtype, self.out_dtype, self.gate)


def cases() -> Iterable[Case]:
    for point in _points():
        scheme = point.scheme
        yield Case(
            name=point.name,
            op="grouped_gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": str(scheme.format) + ("" if scheme.symmetric else "+zp"),
                "group": group_name(scheme),
                "activation": str(scheme.activation or "plain"),
                "tokens": str(point.tokens),
                "segments": point.segments,
                "epilogue": point.gate or "none",
            },
            lanes=(point.lane,),
            build=functools.partial(build_exact if point.lane == "exact" else build_statistical, point),
            profiles=frozenset({"quant", "deterministic"} | ({"tiny-full"} if point.tokens <= 4 else set())),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _schemes() -> Iterable[QuantScheme]:
    yield MXFP4
    yield QuantScheme(INT4, 32, symmetric=False)
    yield QuantScheme(INT4, 128)
    yield QuantScheme(INT8, 0)
    yield QuantScheme(INT8, 0, activation=INT8)
    for quant_format in (FP8, FNUZ):
        yield QuantScheme(quant_format, 0)
        yield QuantScheme(quant_format, 128, block_rows=128)
        yield QuantScheme(quant_format, 128, activation=quant_format, block_rows=128, activation_group_size=128)
    yield from (QuantScheme(f) for f in (QuantFormat.GGUF_Q8_0, QuantFormat.GGUF_Q4_K, QuantFormat.GGUF_Q6_K))


def _points() -> Iterable[Point]:
    for scheme in _schemes():
        n, k = (136, 160) if scheme.block_rows > 1 else (24, 256)
        for dtype in (F32, BF16, F16):
            at = functools.partial(Point, scheme=scheme, dtype=dtype, n=n, k=k)
            yield at("exact", out_dtype=F32, tokens=19)
            if scheme.activation is None:
                yield at("statistical", out_dtype=dtype, tokens=19, segments="empty")
                yield at("statistical", out_dtype=dtype, tokens=9, gate="silu", n=2 * n if scheme.block_rows > 1 else n)
        for tokens, segments in ((0, "even"), (1, "ragged"), (3, "one"), (4, "even")):
            yield Point("exact", scheme, F32, F32, tokens, n, k, segments)


def _faults(point: Point) -> frozenset[str]:
    if point.lane != "exact" or point.tokens != 19 or point.dtype != F32 or point.scheme.activation is not None:
        return frozenset()
    if point.scheme == MXFP4:
        return frozenset({"mxfp4-exponent-off-by-one", "mxfp4-sign-lost"})
    return frozenset({"block-scales-as-row-scales"} if point.scheme.block_rows > 1 else ())


def build_exact(point: Point, draw: Draw) -> Trial:
    weights = [
        exact_weight(point.scheme, point.n, point.k, draw, dtype=point.dtype, is_gated=point.gate is not None)
        for _ in range(EXPERTS)
    ]
    largest = max(w.largest for w in weights)
    x = dense_x(point.scheme, point.tokens, point.k, draw, largest=largest, dtype=point.dtype)
    bounds = segment_bounds(EXPERTS, point.tokens, point.segments, draw)

    def check(outputs: Outputs) -> list[Finding]:
        pieces = [oracle.gemm(x[span], w.dense()).out for span, w in zip(_spans(bounds), weights, strict=True)]
        return [exact("out", outputs["out"], torch.cat(pieces))]

    return _trial(point, x, weights, bounds, check)


def build_statistical(point: Point, draw: Draw) -> Trial:
    is_gated = point.gate is not None
    weights = [typical_weight(point.scheme, point.n, point.k, draw, is_gated=is_gated) for _ in range(EXPERTS)]
    x = draw.normal(point.tokens, point.k, mean=0.1, dtype=point.dtype)
    bounds = segment_bounds(EXPERTS, point.tokens, point.segments, draw)

    def check(outputs: Outputs) -> list[Finding]:
        spans = _spans(bounds)
        pieces = [oracle.gemm(x[s], w.dense(), gate=point.gate) for s, w in zip(spans, weights, strict=True)]
        want = torch.cat([p.out for p in pieces])
        bound = product_bound(
            want,
            torch.cat([p.squares for p in pieces]),
            inner=point.k,
            dtype=point.out_dtype,
            accumulation=draw.accumulation,
            slope=torch.cat([p.slope for p in pieces if isinstance(p.slope, torch.Tensor)]) if is_gated else 1.0,
            x_dtype=point.dtype,
            operand_unit=UNIT[point.dtype],  # as in gemm_quant
            term_squares=torch.cat(
                [w.term_squares(x[s], is_gated=is_gated) for s, w in zip(spans, weights, strict=True)]
            ),
        )
        return [statistical("out", outputs["out"], want, bound)]

    return _trial(point, x, weights, bounds, check)


def _spans(bounds: list[int]) -> list[slice]:
    return [slice(bounds[e], bounds[e + 1]) for e in range(EXPERTS)]


def _trial(
    point: Point, x: torch.Tensor, drawn: list[Drawn], bounds: list[int], check: Callable[[Outputs], list[Finding]]
) -> Trial:
    def run(bench: Bench) -> None:
        weights = [bench.weight(f"w{e}") for e in range(EXPERTS)]
        call = bench.op("grouped_gemm", point.spec)
        call(bench["x"], weights, bench["segment_start"], out=bench["out"], gate=point.gate)

    width = point.n // 2 if point.gate else point.n
    tensors = (
        given("x", x),
        given("segment_start", torch.tensor(bounds, dtype=torch.int32)),
        wanted("out", (point.tokens, width), point.out_dtype),
    )
    weights = tuple(HostWeight(f"w{e}", point.spec, w.parts) for e, w in enumerate(drawn))
    return Trial(tensors, run, check, weights, is_empty=point.tokens == 0)
