"""The quantiser of activations: int8 per token, tensor and group, and both 8-bit floats.

    quantize.exact/…        every scale is a power of two: values on codes and half-way between two of them
    quantize.statistical/…  normal numbers: scales to 2 ulp, codes within one

Half-way values show the rounding: to nearest even, not up, not away from zero, not truncated. Rows of zeros have scale
1. The last group of a row may be cut short. "tiny" rows are so small that max / 127 is a subnormal number of one digit,
and x / scale passes the largest code: the conversion must saturate. It asks for subnormal numbers, which some devices
flush, so it belongs to `quant` only.
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
from octavo.conformance.lanes import codes
from octavo.conformance.lanes.exact import exact
from octavo.conformance.oracle import quantise
from octavo.conformance.trial import Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import QuantFormat, QuantScheme, RowSpec

FORMATS = (QuantFormat.INT8, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ)
TINY = 2.0**-149
"""The smallest fp32 number."""


@dataclass(frozen=True)
class Point:
    """x [T, K]; kind: "exact", "statistical" or "tiny"."""

    kind: str
    dtype: torch.dtype
    quant_format: QuantFormat
    group_size: int
    tokens: int
    k: int
    gap: int = 0

    @property
    def name(self) -> str:
        granularity = {0: "row", -1: "tensor"}.get(self.group_size, f"g{self.group_size}")
        parts = [dtype_name(self.dtype), str(self.quant_format), granularity, f"{self.tokens}x{self.k}"]
        parts += ["tiny"] if self.kind == "tiny" else []
        return f"quantize.{self.lane}/{'-'.join(parts)}" + (f"-gap{self.gap}" if self.gap else "")

    @property
    def lane(self) -> str:
        return "statistical" if self.kind == "statistical" else "exact"

    @property
    def scheme(self) -> QuantScheme:
        return QuantScheme(self.quant_format, self.group_size)


def cases() -> Iterable[Case]:
    for point in _points():
        yield Case(
            name=point.name,
            op="quantize",
            spec=RowSpec(point.k, point.dtype, str(point.quant_format), point.group_size),
            axes={
                "dtype": dtype_name(point.dtype),
                "format": str(point.quant_format),
                "group": str(point.group_size),
                "width": str(point.k),
                "stride": "strided" if point.gap else "dense",
            },
            lanes=(point.lane,),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=_faults(point),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterable[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for quant_format in FORMATS:
            at = functools.partial(Point, dtype=dtype, quant_format=quant_format)
            for group_size in (0, 32, 64, 128, -1):
                yield at("exact", group_size=group_size, tokens=5, k=256)
                yield at("statistical", group_size=group_size, tokens=17, k=384)
            for group_size in (32, 128):
                yield at("exact", group_size=group_size, tokens=3, k=200)
            for tokens, k in ((0, 64), (1, 33), (65, 100), (3, 4097)):
                yield at("exact", group_size=0, tokens=tokens, k=k)
            yield at("exact", group_size=0, tokens=5, k=96, gap=32)
    yield Point("tiny", torch.float32, QuantFormat.INT8, 0, 5, 96)


def _profiles(point: Point) -> frozenset[str]:
    if point.kind == "tiny":
        return frozenset({"quant"})
    names = {"core", "quant", "deterministic"}
    if point.k in {96, 256} and point.group_size in {0, 32}:
        names |= {"smoke", "tiny"}
    return frozenset(names | ({"tiny-full"} if point.tokens * point.k <= 7000 else set()))


def _faults(point: Point) -> frozenset[str]:
    if point.kind == "tiny":
        return frozenset({"quantize-no-saturation"})
    is_small = point.dtype == torch.float32 and point.kind == "exact" and point.k == 256
    return frozenset({"quantize-truncates"}) if is_small and point.group_size in {0, 32} else frozenset()


def build(point: Point, draw: Draw) -> Trial:
    x = {"exact": _on_codes, "statistical": _normal, "tiny": _tiny}[point.kind](point, draw)
    shape = (point.tokens, point.k)

    def run(bench: Bench) -> None:
        spec = RowSpec(point.k, point.dtype, str(point.quant_format), point.group_size)
        bench.op("quantize", spec)(bench["x"], point.scheme, out=bench["out"], scales=bench["scales"])

    def check(outputs: Outputs) -> list[Finding]:
        want, scales = quantise.quantise(x, point.quant_format, point.group_size)
        got = quantise.decode(outputs["out"])
        if point.lane == "exact":
            return [exact("out", got, want), exact("scales", outputs["scales"], scales)]
        return [codes.near("out", got, want, point.quant_format), codes.scales("scales", outputs["scales"], scales)]

    tensors = (
        given("x", x, strides=row_strides(shape, point.gap) if point.gap else None),
        wanted("out", shape, point.quant_format.code_dtype),
        wanted("scales", point.scheme.scale_shape(*shape), torch.float32),
    )
    return Trial(tensors, run, check, is_empty=point.tokens == 0)


def _on_codes(point: Point, draw: Draw) -> torch.Tensor:
    """Codes' values and the middles between neighbours, times 2^k, with the largest code in each group."""
    ladder = _ladder(point.quant_format)
    grid = torch.cat((ladder, (ladder[1:] + ladder[:-1]) / 2))
    picks = draw.integers(0, len(grid) - 1, point.tokens, point.k, dtype=torch.int64)
    x = grid[picks].float() * draw.signs(point.tokens, point.k)
    group = point.group_size if point.group_size > 0 else point.k
    for start in range(0, point.k, group):
        part = x[:, start : start + group]
        where = draw.integers(0, part.shape[1] - 1, point.tokens, 1, dtype=torch.int64)
        part.scatter_(1, where, float(ladder[-1]) * draw.signs(point.tokens, 1))
        if point.group_size != -1:
            part *= torch.exp2(draw.integers(-3, 0, point.tokens, 1))
    if point.group_size == -1:
        return (x * torch.exp2(draw.integers(-3, 0, 1))).to(point.dtype)
    if point.tokens > 2:
        x[1] = 0  # scale 1, codes 0
    return x.to(point.dtype)


def _ladder(quant_format: QuantFormat) -> torch.Tensor:
    """The codes' values that are not negative, ascending."""
    if quant_format is QuantFormat.INT8:
        return torch.arange(128, dtype=torch.float64)
    table = quantise.fp8_values(is_fnuz=quant_format is QuantFormat.FP8_E4M3FNUZ)
    values: torch.Tensor = torch.unique(table[table >= 0])
    return values


def _normal(point: Point, draw: Draw) -> torch.Tensor:
    size = torch.exp2(draw.integers(-4, 4, point.tokens, 1))
    return (draw.normal(point.tokens, point.k) * size).to(point.dtype)


def _tiny(point: Point, draw: Draw) -> torch.Tensor:
    """max = 180 units of the smallest number: max / 127 rounds to one unit, and codes beyond 127 must saturate."""
    x = draw.integers(-180, 180, point.tokens, point.k)
    x[:, 0] = 180
    return (x.double() * TINY).float()
