"""Rotary embedding fused with the cache write: q turned into out_q, k turned on its way to its slot, v as it is.

    rope_write_kv.exact/…        every angle a quarter turn: cos and sin are 0 or ±1, and nothing is rounded but to the
                                 cache's dtype
    rope_write_kv.statistical/…  ordinary angles; values are still exact

Positions come in any order and repeat; only the first `rotary_dim` elements turn; k must be left as it was.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.finding import Finding
from octavo.conformance.grid import cache
from octavo.conformance.grid.attending import ONE_BYTE
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import U32, UNIT, rotary_bound, rounding_bound
from octavo.conformance.oracle.rows import rotary
from octavo.conformance.trial import HostTensor, Outputs, Trial, given, wanted
from octavo.core.backend import CacheSpec, KVLayout

NUM_POSITIONS = 64


@dataclass(frozen=True)
class Point:
    """How q and k turn, and the write's own point. heads H; rotary_dim R of the head's elements turn."""

    lane: str
    write: cache.Point
    heads: int
    rotary_dim: int
    is_interleaved: bool = False

    @property
    def name(self) -> str:
        turn = f"h{self.heads}r{self.rotary_dim}" + ("-interleaved" if self.is_interleaved else "")
        return f"rope_write_kv.{self.lane}/{self.write.name}-{turn}"

    @property
    def spec(self) -> CacheSpec:
        w = self.write
        return CacheSpec(
            *w.shape,
            w.dtype,
            w.kv_dtype,
            w.block_size,
            KVLayout.NHD,
            w.kv_scale,
            self.heads,
            self.rotary_dim,
            self.is_interleaved,
        )


def cases() -> Iterable[Case]:
    for point in _points():
        write = point.write
        yield Case(
            name=point.name,
            op="rope_write_kv",
            spec=point.spec,
            axes=write.axes()
            | {
                "rotary": "whole" if point.rotary_dim == write.shape[1] else "partial",
                "pairs": "interleaved" if point.is_interleaved else "halves",
            },
            lanes=("exact",) if point.lane == "exact" else ("exact", "statistical"),
            build=functools.partial(build, point),
            profiles=write.profiles,
            faults=frozenset(write.catches),
            requires=all_of(computes_in(write.dtype), stores_kv_in(write.kv_dtype)),
        )


def _points() -> Iterator[Point]:
    for (dtype, kv_dtype), is_interleaved in itertools.product(cache.DTYPES, (False, True)):
        is_plain = dtype == kv_dtype == torch.float32 and not is_interleaved
        catches = ("slot-minus-one-last-slot",) if is_plain else ()
        for lane in ("exact", "statistical"):
            at = functools.partial(Point, lane, is_interleaved=is_interleaved)
            yield at(cache.Point(dtype, kv_dtype, catches=catches), 4, 64)
            yield at(cache.Point(dtype, kv_dtype, (1, 128, 128), 1, 5, is_fused=True), 5, 64)
            yield at(cache.Point(dtype, kv_dtype, (3, 80, 80), 32, 70, has_gaps=True), 6, 80)
            yield at(cache.Point(dtype, kv_dtype, (2, 192, 128), 64, 1), 2, 64)
            yield at(cache.Point(dtype, kv_dtype, (1, 256, 256), 256, 33), 8, 256)
        yield Point("exact", cache.Point(dtype, kv_dtype, rows=0), 4, 64, is_interleaved)
    for dtype, kv_dtype in itertools.product((torch.float32, torch.bfloat16), ONE_BYTE):
        for kv_scale in ("tensor", "head"):
            faults = ("kv-scales-ignored", "kv-scales-swapped") if dtype == torch.float32 else ()
            yield Point("exact", cache.Point(dtype, kv_dtype, kv_scale=kv_scale, catches=faults), 4, 64)


def build(point: Point, draw: Draw) -> Trial:
    w = point.write
    heads, head_dim, v_head_dim = w.shape
    q = draw.normal(w.rows, point.heads, head_dim, std=3.0, dtype=w.dtype)
    scales = cache.kv_scales(w)
    k = cache.ordinary_and_edges(w, draw, head_dim, scales.get("k_scale"))
    v = cache.ordinary_and_edges(w, draw, v_head_dim, scales.get("v_scale"))
    positions = draw.integers(0, NUM_POSITIONS - 1, w.rows, dtype=torch.int64)
    table = _table(point, draw)
    slots, pool = cache.slots_and_pool(w, draw)
    row = (point.heads * head_dim + heads * (head_dim + v_head_dim),) if w.is_fused else None
    tensors: list[HostTensor] = [
        given(name, x, strides=(*row, x.shape[2], 1) if row else None) for name, x in (("q", q), ("k", k), ("v", v))
    ]
    tensors += [given("positions", positions), given("table", table), given("slots", slots)]
    tensors += [given(name, x) for name, x in scales.items()]
    tensors.append(wanted("out_q", q.shape, w.dtype))

    def check(outputs: Outputs) -> list[Finding]:
        if not w.rows:
            return []
        turn = functools.partial(rotary, cos_sin_PR=table, is_interleaved=point.is_interleaved)
        (want_q, size_q), (want_k, size_k) = turn(q, positions), turn(k, positions)
        value = cache.stored_right(w, "kv.value", outputs, v, slots, scales.get("v_scale"))
        if point.lane == "exact":
            key = cache.stored_right(w, "kv.key", outputs, want_k.to(w.dtype), slots, scales.get("k_scale"))
            return [exact("out_q", outputs["out_q"], want_q), key, value]
        kept = slots >= 0
        order = slots[kept].argsort()
        stored, size = want_k[kept][order], size_k[kept][order]
        # k is rounded to its own dtype before it is to the cache's.
        inner = 3 * U32 * size + (2 * UNIT[w.dtype] * stored.abs() if w.dtype != w.kv_dtype else 0.0)
        return [
            statistical("out_q", outputs["out_q"], want_q, rotary_bound(want_q, size_q, dtype=w.dtype)),
            statistical("kv.key", outputs["kv.key"], stored, rounding_bound(stored, dtype=w.kv_dtype, inner=inner)),
            value,
        ]

    return Trial(
        tuple(tensors), functools.partial(_run, point, list(scales)), check, pools=(pool,), is_empty=not w.rows
    )


def _table(point: Point, draw: Draw) -> torch.Tensor:
    """cos | sin [P, R] fp32."""
    half = point.rotary_dim // 2
    if point.lane == "exact":
        turns = draw.integers(0, 3, NUM_POSITIONS, half, dtype=torch.int64)
        return torch.cat((torch.tensor([1.0, 0, -1, 0])[turns], torch.tensor([0.0, 1, 0, -1])[turns]), dim=1)
    angles = draw.uniform(NUM_POSITIONS, half, low=-math.pi, high=math.pi)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _run(point: Point, scales: list[str], bench: Bench) -> None:
    bench.op("rope_write_kv", point.spec)(
        bench["q"],
        bench["k"],
        bench["v"],
        bench["positions"],
        bench["table"],
        bench.kv("kv"),
        bench["slots"],
        out_q=bench["out_q"],
        interleaved=point.is_interleaved,
        **{name: bench[name] for name in scales},
    )
