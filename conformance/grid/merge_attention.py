"""Merging attention over two sets of keys: parts of every size against each other, empty parts, and a real split.

    merge_attention/…        out and lse of two drawn parts; where a part is empty its values are NaN
    merge_attention.split/…  attention over some keys and over the others, merged: the same as over all

Rows go through all kinds: lse far apart (the smaller part vanishes), equal, one part empty, both empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import Setting
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import U32, Bound, rounding_bound
from octavo.conformance.oracle.attention import Rule, attend, merge
from octavo.conformance.trial import Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import RowSpec

KINDS = 6
"""Row t is of kind t % KINDS: alike, far apart, far apart the other way, a empty, b empty, both empty."""


@dataclass(frozen=True)
class Point:
    """out [T, H, D]; gap: elements between heads. cut: keys of the first part, for a split."""

    dtype: torch.dtype
    rows: int
    heads: int
    head_dim: int
    gap: int = 0
    has_lse: bool = True
    cut: int | None = None

    @property
    def name(self) -> str:
        parts = [dtype_name(self.dtype), f"t{self.rows}h{self.heads}d{self.head_dim}"]
        parts += [f"gap{self.gap}"] if self.gap else []
        parts += [] if self.has_lse else ["nolse"]
        return "-".join(parts + ([] if self.cut is None else [f"cut{self.cut}"]))

    @property
    def spec(self) -> RowSpec:
        return RowSpec(self.head_dim, self.dtype)


def cases() -> Iterable[Case]:
    for point in _points():
        names = {"core", "deterministic", "tiny-full"}
        names |= {"smoke", "tiny"} if point.head_dim == 64 and point.rows < 20 else set()
        names |= {"mla"} if point.head_dim == 512 else set()
        yield Case(
            name=f"merge_attention{'' if point.cut is None else '.split'}/{point.name}",
            op="merge_attention",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "head": str(point.head_dim),
                "stride": "strided" if point.gap else "dense",
                "parts": "drawn" if point.cut is None else "split",
            },
            lanes=("statistical",),
            build=functools.partial(build if point.cut is None else build_split, point),
            profiles=frozenset(names),
            faults=frozenset({"merge-empty-part"} if (point.rows, point.head_dim, point.cut) == (13, 64, None) else ()),
            requires=computes_in(point.dtype),
        )


def _points() -> Iterator[Point]:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for head_dim in (1, 32, 64, 80, 112, 128, 256, 512):
            yield Point(dtype, 13, 3, head_dim)
        for rows in (0, 1, 300):
            yield Point(dtype, rows, 4, 64)
        yield Point(dtype, 13, 1, 64)
        yield Point(dtype, 13, 32, 64)
        yield Point(dtype, 13, 3, 64, gap=8)
        yield Point(dtype, 13, 3, 64, has_lse=False)
    for cut in (0, 1, 16, 33):
        yield Point(torch.float32, 2, 4, 64, cut=cut)


def build(point: Point, draw: Draw) -> Trial:
    shape = (point.rows, point.heads, point.head_dim)
    out_a, out_b = (draw.normal(*shape, mean=0.2, dtype=point.dtype) for _ in range(2))
    lse_a, lse_b = (draw.normal(*shape[:2], mean=3.0, std=2.0) for _ in range(2))
    kind = torch.arange(point.rows) % KINDS
    lse_a[kind == 1] += 12
    lse_b[kind == 2] += 200
    for lse, out, empty in ((lse_a, out_a, (kind == 3) | (kind == 5)), (lse_b, out_b, (kind == 4) | (kind == 5))):
        lse[empty] = -torch.inf
        out[empty] = torch.nan
    strides = row_strides(shape, point.gap) if point.gap else None
    tensors = [
        given("out_a", out_a, strides=strides),
        given("lse_a", lse_a),
        given("out_b", out_b, strides=strides),
        given("lse_b", lse_b),
        wanted("out", shape, point.dtype, strides=strides),
    ]
    if point.has_lse:
        tensors.append(wanted("lse", shape[:2], torch.float32, is_finite=not bool((kind == 5).any())))

    def check(outputs: Outputs) -> list[Finding]:
        return _judge(point, outputs, out_a, lse_a, out_b, lse_b)

    return Trial(tuple(tensors), functools.partial(_merge, point), check, is_empty=point.rows == 0)


def _judge(
    point: Point,
    outputs: Outputs,
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
) -> list[Finding]:
    want, want_lse = merge(out_a, lse_a, out_b, lse_b)
    inner = merge_error(out_a, lse_a, out_b, lse_b)
    findings = [statistical("out", outputs["out"], want, rounding_bound(want, dtype=point.dtype, inner=inner))]
    if point.has_lse:
        findings.append(statistical("lse", outputs["lse"], want_lse, _lse_bound(want_lse)))
    return findings


def merge_error(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """What fp32 arithmetic adds before the rounding to dtype.

    A weight exp(lse_i - total) errs by the roundings of total and of the difference, each within u32·|lse|, and by a
    few ulp of exp and of two products: u32·(2|total| + |lse_i| + 6) of |w_i·out_i|. The sum of both rounds once more.
    """
    _, total = merge(out_a, lse_a, out_b, lse_b)
    sizes = []
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        is_empty = lse == -torch.inf
        weight = torch.where(is_empty, 0.0, (lse.double() - total).exp())
        factor = 2 * _finite(total).abs() + _finite(lse.double()).abs() + 6
        sizes.append(torch.where(is_empty[..., None], 0.0, (weight * factor)[..., None] * out.double().abs()))
    return U32 * (sizes[0] + sizes[1])


def _lse_bound(lse: torch.Tensor) -> Bound:
    """log(e^a + e^b) in fp32: a few ulp of the result, and of the logarithm's argument near 1."""
    finite = _finite(lse)
    return rounding_bound(finite, dtype=torch.float32, inner=U32 * (2 * finite.abs() + 4))


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.isfinite(), x, 0.0)


def _merge(point: Point, bench: Bench) -> None:
    extra = {"lse": bench["lse"]} if point.has_lse else {}
    bench.op("merge_attention", point.spec)(
        bench["out_a"], bench["lse_a"], bench["out_b"], bench["lse_b"], out=bench["out"], **extra
    )


def build_split(point: Point, draw: Draw) -> Trial:
    """Keys 0 … cut and the rest apart, not causal: decode over a shared prefix and over a request's own keys."""
    length, cut = 33, point.cut or 0
    setting = Setting(point.heads, 2, point.head_dim, point.head_dim, point.dtype, point.dtype, causal=False)
    q = draw.normal(point.rows, point.heads, point.head_dim)
    k, v = (draw.normal(length, 2, point.head_dim, mean=0.2) for _ in range(2))
    rule = Rule(setting.softmax_scale, causal=False)
    parts = {"a": slice(0, cut), "b": slice(cut, length)}
    shape = (point.rows, point.heads, point.head_dim)
    tensors = [given("q", q), given("rows", torch.tensor([0, point.rows], dtype=torch.int32))]
    tensors += [wanted("out", shape, point.dtype), wanted("lse", shape[:2], torch.float32)]
    for part, span in parts.items():
        size, is_empty = span.stop - span.start, span.stop == span.start
        tensors += [given(f"k_{part}", k[span]), given(f"v_{part}", v[span])]
        tensors.append(given(f"keys_{part}", torch.tensor([0, size], dtype=torch.int32)))
        tensors.append(wanted(f"out_{part}", shape, point.dtype, may_be_zero=is_empty))
        tensors.append(wanted(f"lse_{part}", shape[:2], torch.float32, is_finite=not is_empty))

    def run(bench: Bench) -> None:
        for part in parts:
            bench.op("attention", setting.spec(1))(
                bench["q"], bench[f"k_{part}"], bench[f"v_{part}"], bench["rows"], bench[f"keys_{part}"],
                out=bench[f"out_{part}"], lse=bench[f"lse_{part}"], causal=False, softmax_scale=rule.softmax_scale,
            )  # fmt: skip
        _merge(point, bench)

    def check(outputs: Outputs) -> list[Finding]:
        whole = attend(q, [k], [v], [point.rows], rule)
        got = [outputs[name] for name in ("out_a", "lse_a", "out_b", "lse_b")]
        # The parts' own roundings and the whole's are of one kind; the merge adds its own to weighted parts.
        bound, more = whole.out_bound(point.head_dim, point.dtype), merge_error(*got)
        wider = Bound(2 * bound.element + more, 2 * bound.sigma + more / 2, bound.unit)
        return [*_judge(point, outputs, *got), statistical("out", outputs["out"], whole.out, wider)]

    return Trial(tuple(tensors), run, check)
