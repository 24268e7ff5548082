"""Paged attention: every axis of the grid pairwise, each known edge on its own, and what only a big pool shows.

    paged_attention.statistical/…  normal numbers against the float64 oracle, log-sum-exp beside it
    paged_attention.needle/…       one key's value bit for bit: at every edge, or a decoy where it is hidden
    paged_attention.visible/…      exactly the keys that a row may see, where softcap prevents saturation too

The points stand in paged_points.py; here they become cases. Queries lie dense, in a fused QKV row, or with gaps;
blocks lie one behind the other or apart; HND and interleaved caches come from the backend's own layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch

from octavo.conformance.case import Case, all_of, computes_in, holds_bytes, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.grid.attending import (
    ONE_BYTE_PROFILES,
    Drawn,
    draw_needle,
    draw_statistical,
    draw_visible,
    sees_anything,
)
from octavo.conformance.grid.batch import Batch, lay_out
from octavo.conformance.grid.paged_points import Point, points
from octavo.conformance.harness.bench import Bench
from octavo.conformance.trial import HostPool, HostTensor, Trial, given, row_strides, wanted
from octavo.core.backend import KVCacheSpec

TINY_WORK = 100_000
INTERPRETER_WORK = 2_000_000
"""Multiplications of the first product, for the profiles of quick runs."""


def cases() -> Iterable[Case]:
    for point in points():
        setting = point.setting
        yield Case(
            name=point.name,
            op="paged_attention",
            spec=setting.spec(point.block_size),
            axes=setting.axes()
            | {
                "block": str(point.block_size),
                "context": str(max(r.num_keys for r in point.requests)),
                "batch": point.scene,
                "q": point.q_layout,
                "stride": "strided" if point.has_gaps else "dense",
            },
            lanes=("statistical",) if point.lane == "statistical" else ("probe",),
            build=functools.partial(build, point),
            profiles=_profiles(point),
            faults=frozenset(point.catches),
            requires=all_of(
                computes_in(setting.dtype), stores_kv_in(setting.kv_dtype), holds_bytes(_pool_bytes(point))
            ),
            is_large=point.is_big,
            timeout_s=300.0 if point.is_big else 60.0,
        )


def _profiles(point: Point) -> frozenset[str]:
    if point.candidates:
        return frozenset({"core", "deterministic"})  # A pool too big to fill, but little work.
    if point.is_big:
        return frozenset()
    if point.setting.head_dim > 512:
        return frozenset({"mla"})
    if point.setting.kv_dtype in ONE_BYTE_PROFILES:
        return ONE_BYTE_PROFILES[point.setting.kv_dtype]
    names = {"core", "deterministic"} | ({"smoke"} if point.is_smoke else set())
    names |= {"tiny"} if point.is_smoke and point.work <= TINY_WORK else set()
    return frozenset(names | ({"tiny-full"} if point.work <= INTERPRETER_WORK else set()))


def build(point: Point, draw: Draw) -> Trial:
    batch = lay_out(
        draw,
        point.requests,
        point.block_size,
        window=point.setting.window,
        extra_columns=point.extra_columns,
        candidates=point.candidates or None,
    )
    drawn = _drawn(point, draw)
    return Trial(
        tuple(_tensors(point, batch, drawn)),
        functools.partial(_run, point, batch),
        drawn.check,
        pools=(_pool(point, batch, drawn),),
        is_empty=batch.num_tokens == 0,
    )


def _drawn(point: Point, draw: Draw) -> Drawn:
    if point.lane == "needle":
        return draw_needle(draw, point.setting, point.requests, point.block_size)
    if point.lane == "visible":
        return draw_visible(draw, point.setting, point.requests)
    return draw_statistical(draw, point.setting, point.requests, point.block_size, point.has_lse)


def _tensors(point: Point, batch: Batch, drawn: Drawn) -> list[HostTensor]:
    s, rows = point.setting, batch.num_tokens
    some, every = sees_anything(s, point.requests)
    shape, out_shape = (rows, s.heads, s.head_dim), (rows, s.heads, s.v_head_dim)
    strides = {
        "dense": None,
        "fused": (s.heads * s.head_dim + s.kv_heads * (s.head_dim + s.v_head_dim), s.head_dim, 1),
        "gapped": row_strides(shape, 8),
    }[point.q_layout]
    out_strides = row_strides(out_shape, 16) if point.q_layout == "gapped" else None
    tensors = batch.tensors()
    tensors += [given("q", drawn.q_THD, strides=strides)]
    tensors += [wanted("out", out_shape, s.dtype, strides=out_strides, may_be_zero=not some)]
    if point.has_lse:
        tensors.append(wanted("lse", (rows, s.heads), torch.float32, is_finite=every, may_be_zero=True))
    extras = {
        "sinks": drawn.rule.sinks_H,
        "slopes": drawn.rule.alibi_slopes_H,
        "k_scale": drawn.k_scale,
        "v_scale": drawn.v_scale,
    }
    return tensors + [given(name, x) for name, x in extras.items() if x is not None]


def _pool(point: Point, batch: Batch, drawn: Drawn) -> HostPool:
    s = point.setting
    spec = KVCacheSpec(s.kv_heads, s.head_dim, s.v_head_dim, s.kv_dtype, point.block_size, s.window)
    # Half a block and a bit, in whole elements of any dtype: no stride is a product of sizes.
    pad = 16 * math.ceil(spec.block_bytes / 32) + 64 if point.has_gaps else 0
    is_lazy = bool(point.candidates)
    blocks = batch.blocks(drawn.keys, drawn.values)
    # Where an id or an offset that lost its upper bits would lead.
    for block in list(blocks) if is_lazy else []:
        for bits in point.lost_bits:
            blocks.setdefault(block & ((1 << bits) - 1), None)
    return HostPool("kv", spec, batch.num_blocks, blocks, pad_bytes=pad, is_lazy=is_lazy)


def _pool_bytes(point: Point) -> int:
    """Of a pool that is mapped and hardly touched; 0 for an ordinary one."""
    s = point.setting
    spec = KVCacheSpec(s.kv_heads, s.head_dim, s.v_head_dim, s.kv_dtype, point.block_size)
    return (max(point.candidates, default=-1) + 1) * spec.block_bytes


def _run(point: Point, batch: Batch, bench: Bench) -> None:
    s = point.setting
    plan = bench.plan(batch.metadata(bench))
    extra: dict[str, object] = {"lse": bench["lse"]} if point.has_lse else {}
    extra |= {"sinks_H": bench["sinks"]} if s.sinks else {}
    extra |= {"alibi_slopes_H": bench["slopes"]} if s.alibi else {}
    extra |= {"k_scale": bench["k_scale"], "v_scale": bench["v_scale"]} if s.kv_scale != "none" else {}
    bench.op("paged_attention", s.spec(point.block_size))(
        bench["q"],
        bench.kv("kv"),
        plan,
        out=bench["out"],
        causal=s.causal,
        softmax_scale=s.softmax_scale,
        window=s.window,
        softcap=s.softcap,
        **extra,
    )
