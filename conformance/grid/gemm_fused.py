"""What fuses around a product besides bias, gate and residual: a norm in front, argmax or quantisation behind.

    gemm.norm/…      RMSNorm of x, then the product: statistical, rows of very different sizes
    gemm.argmax/…    exact sums whose maximum occurs twice: the lowest id wins
    gemm.quantize/…  exact sums in which every group's largest is the largest code times 2^k: codes and scales are exact

For the last: one signal column only, in which x is 1 or 2, so that c = x · delta, and every group of delta holds the
largest code (127; 112 = 448 / 4; 120 = 240 / 2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import OUTPUT_BITS, exact, product
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import UNIT, norm_error, product_bound
from octavo.conformance.oracle import product as oracle
from octavo.conformance.oracle import quantise, rows
from octavo.conformance.trial import HostWeight, Outputs, Trial, given, wanted
from octavo.core.backend import Epilogue, Gate, GemmSpec, NormPrologue, QuantFormat, QuantScheme, WeightSpec

EPS = 1e-6
PER_TOKEN = QuantScheme(QuantFormat.INT8)
DTYPES = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16),
          (torch.float16, torch.float16))  # fmt: skip
TOP_CODE = {QuantFormat.INT8: 127, QuantFormat.FP8_E4M3FN: 112, QuantFormat.FP8_E4M3FNUZ: 120}
"""The largest |delta|, a power of two times the format's largest code. Never written to."""


@dataclass(frozen=True)
class Point:
    """x [M, K] in `dtype`, weight [N, K] in `stored`; `kind` is norm, argmax or quantize."""

    kind: str
    dtype: torch.dtype
    stored: torch.dtype
    m: int
    n: int
    k: int
    has_bias: bool = False
    has_residual: bool = False
    gate: Gate | None = None
    scheme: QuantScheme = PER_TOKEN

    @property
    def name(self) -> str:
        dtypes = dtype_name(self.dtype) + ("" if self.stored == self.dtype else f".{dtype_name(self.stored)}")
        parts = [dtypes, f"m{self.m}-n{self.n}-k{self.k}"]
        parts += ["bias"] if self.has_bias else []
        parts += [self.gate] if self.gate else []
        parts += ["residual"] if self.has_residual else []
        parts += [f"{self.scheme.format}-g{self.scheme.group_size}"] if self.is_quantised else []
        return f"gemm.{self.kind}/{'-'.join(parts)}"

    @property
    def is_quantised(self) -> bool:
        return self.kind == "quantize"

    @property
    def out_dtype(self) -> torch.dtype:
        if self.kind == "argmax":
            return torch.int64
        return self.scheme.format.code_dtype if self.is_quantised else self.dtype

    @property
    def spec(self) -> GemmSpec:
        return GemmSpec(
            WeightSpec(self.n, self.k, self.stored, gated=self.gate is not None),
            self.dtype,
            self.out_dtype,
            norm=self.kind == "norm",
            bias=self.has_bias,
            residual=self.has_residual,
            gate=self.gate,
            quantize=self.scheme if self.is_quantised else None,
            argmax=self.kind == "argmax",
        )


def cases() -> Iterable[Case]:
    builders = {"norm": build_norm, "argmax": build_argmax, "quantize": build_quantize}
    for point in _points():
        yield Case(
            name=point.name,
            op="gemm",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "weight": dtype_name(point.stored),
                "m": str(point.m),
                "k": str(point.k),
                "epilogue": point.kind,
            },
            lanes=("statistical",) if point.kind == "norm" else ("exact",),
            build=functools.partial(builders[point.kind], point),
            profiles=_profiles(point),
            requires=all_of(computes_in(point.dtype), stores_weights_in(point.stored)),
        )


def _points() -> Iterable[Point]:
    for dtype, stored in DTYPES:
        norm = functools.partial(Point, "norm", dtype, stored)
        for m, k in ((0, 64), (1, 64), (3, 100), (17, 577), (65, 64)):
            yield norm(m, 48, k)
        yield norm(9, 96, 130, gate="silu")
        yield norm(9, 48, 130, has_bias=True, has_residual=True)
        for m, n in ((1, 1000), (5, 48), (65, 33), (3, 2), (2, 4097)):
            yield Point("argmax", dtype, stored, m, n, 100)
        yield Point("argmax", dtype, stored, 5, 48, 100, has_bias=True)
        for quant_format in TOP_CODE:
            for group_size in (0, 32, 128, -1):
                scheme = QuantScheme(quant_format, group_size)
                yield Point("quantize", dtype, stored, 1 if group_size == 128 else 5, 256, 100, scheme=scheme)


def _profiles(point: Point) -> frozenset[str]:
    names = {"core", "deterministic"} | ({"quant"} if point.is_quantised else set())
    if point.m == 5 and point.n == 48:
        names |= {"smoke", "tiny"}
    return frozenset(names | ({"tiny-full"} if point.m * point.n * point.k <= 200_000 else set()))


def build_norm(point: Point, draw: Draw) -> Trial:
    size = torch.exp2(draw.integers(-3, 3, point.m, 1))
    x = (draw.normal(point.m, point.k, mean=0.2) * size).to(point.dtype)
    w = draw.normal(point.n, point.k, mean=0.02, std=point.k**-0.5, dtype=point.stored)
    weight = draw.normal(point.k, mean=1.0, std=0.3)
    width = point.n // 2 if point.gate else point.n
    bias = draw.normal(point.n) if point.has_bias else None
    residual = draw.normal(point.m, width, dtype=point.dtype) if point.has_residual else None

    def check(outputs: Outputs) -> list[Finding]:
        normed = rows.rms_norm(x, weight, EPS)
        want = oracle.gemm(normed, w, bias_N=bias, gate=point.gate, residual=residual)
        bound = product_bound(
            want.out,
            want.squares,
            inner=point.k,
            dtype=point.dtype,
            accumulation=draw.accumulation,
            slope=want.slope,
            x_dtype=point.dtype,
            operand_unit=UNIT[point.dtype],
            relative=norm_error(point.k),
        )
        return [statistical("out", outputs["out"], want.out, bound)]

    tensors = [given("x", x), given("norm", weight), wanted("out", (point.m, width), point.dtype)]
    tensors += [given("bias", bias)] if bias is not None else []
    tensors += [given("residual", residual)] if residual is not None else []
    return Trial(tuple(tensors), functools.partial(_run, point), check, (_streamed(point, w),), is_empty=point.m == 0)


def build_argmax(point: Point, draw: Draw) -> Trial:
    """The second half of the weight's rows repeats the first, so that every maximum occurs twice."""
    half = point.n // 2
    bits = min(OUTPUT_BITS[point.dtype], OUTPUT_BITS[point.stored], 9)
    drawn = product(draw, point.m, point.n, point.k, limit=2 ** (bits - 1), operand_bits=bits)
    x, w = drawn.x_MK.to(point.dtype), drawn.w_NK.to(point.stored)
    w[half : 2 * half] = w[:half]
    bias = draw.integers(0, 16, point.n) if point.has_bias else None
    if bias is not None:
        bias[half : 2 * half] = bias[:half]

    def check(outputs: Outputs) -> list[Finding]:
        sums = oracle.gemm(x, w, bias_N=bias).out
        best = sums == sums.amax(dim=-1, keepdim=True)
        lowest = torch.where(best, torch.arange(point.n), point.n).amin(dim=-1)
        return [exact("out", outputs["out"], lowest)]

    tensors = [given("x", x), wanted("out", (point.m,), torch.int64, may_be_zero=True)]
    tensors += [given("bias", bias)] if bias is not None else []
    return Trial(tuple(tensors), functools.partial(_run, point), check, (_streamed(point, w),))


def build_quantize(point: Point, draw: Draw) -> Trial:
    scheme = point.scheme
    top, group = TOP_CODE[scheme.format], scheme.group_size if scheme.group_size > 0 else point.n
    delta = draw.integers(-(top - 1), top - 1, point.n // group, group)
    where = draw.integers(0, group - 1, point.n // group, 1, dtype=torch.int64)
    delta.scatter_(1, where, top * draw.signs(point.n // group, 1))
    drawn = product(draw, point.m, point.n, point.k, limit=2 * top, operand_bits=6, delta_NJ=delta.reshape(point.n, 1))
    x, w = drawn.x_MK.to(point.dtype), drawn.w_NK.to(point.stored)

    def check(outputs: Outputs) -> list[Finding]:
        codes, scales = quantise.quantise(oracle.gemm(x, w).out, scheme.format, scheme.group_size)
        return [
            exact("out", quantise.decode(outputs["out"]), codes),
            exact("scales", outputs["scales"], scales.reshape(outputs["scales"].shape)),
        ]

    shape = {0: (point.m, 1), -1: (1, 1)}.get(scheme.group_size, (point.m, point.n // group))
    tensors = (
        given("x", x),
        wanted("out", (point.m, point.n), point.out_dtype),
        wanted("scales", shape, torch.float32),
    )
    return Trial(tensors, functools.partial(_run, point), check, (_streamed(point, w),))


def _streamed(point: Point, w: torch.Tensor) -> HostWeight:
    cut = point.n // 2
    return HostWeight("w", point.spec, ((w[:cut], 0), (w[cut:], cut)))


def _run(point: Point, bench: Bench) -> None:
    epilogue = Epilogue(
        bias_N=bench["bias"] if point.has_bias else None,
        gate=point.gate,
        residual=bench["residual"] if point.has_residual else None,
        quantize=point.scheme if point.is_quantised else None,
        out_scales=bench["scales"] if point.is_quantised else None,
        argmax=point.kind == "argmax",
    )
    prologue = NormPrologue(bench["norm"], EPS) if point.kind == "norm" else None
    call = bench.op("gemm", point.spec)
    if prologue is None:
        call(bench["x"], bench.weight("w"), out=bench["out"], epilogue=epilogue)
    else:
        call(bench["x"], bench.weight("w"), out=bench["out"], prologue=prologue, epilogue=epilogue)
