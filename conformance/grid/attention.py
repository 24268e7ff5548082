"""Attention over ragged contiguous keys: the paged family's rules without pages.

    attention.statistical/…  every axis pairwise, causal or not      attention.needle/…  both sides of every edge
    attention.visible/…      which keys count

K and V lie dense or in a fused row; rows beyond the last request hold NaN. A causal mask is aligned bottom-right, so
chunks, drafts and more rows than keys all occur.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.conformance.case import Case, computes_in
from octavo.conformance.draw import Draw
from octavo.conformance.grid.attending import (
    Drawn,
    Setting,
    draw_needle,
    draw_statistical,
    draw_visible,
    sees_anything,
)
from octavo.conformance.grid.batch import Request, scene
from octavo.conformance.grid.pairwise import pairwise
from octavo.conformance.harness.bench import Bench
from octavo.conformance.trial import HostTensor, Trial, given, row_strides, wanted

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TAIL_ROWS = 2
EDGE = 16
"""Stands for the block size where targets lie at block edges: kernels tile contiguous keys too."""
PLAIN = Setting()


@dataclass(frozen=True)
class Point:
    """A point of the grid. is_fused: k and v share a row, q and out have gaps."""

    lane: str
    scene: str
    requests: tuple[Request, ...]
    setting: Setting = PLAIN
    is_fused: bool = False
    has_lse: bool = False
    catches: tuple[str, ...] = ()
    is_smoke: bool = False

    @property
    def name(self) -> str:
        context = max(r.num_keys for r in self.requests)
        tail = ("-fused" if self.is_fused else "") + ("-lse" if self.has_lse else "")
        return f"attention.{self.lane}/{self.scene}.{context}-{self.setting.name}{tail}"


def cases() -> Iterable[Case]:
    for point in itertools.chain(_edges(), _pairs()):
        names = {"core", "deterministic"} | ({"smoke", "tiny"} if point.is_smoke else set())
        yield Case(
            name=point.name,
            op="attention",
            spec=point.setting.spec(1),
            axes=point.setting.axes()
            | {
                "context": str(max(r.num_keys for r in point.requests)),
                "batch": point.scene,
                "causal": "yes" if point.setting.causal else "no",
                "stride": "strided" if point.is_fused else "dense",
            },
            lanes=("statistical",) if point.lane == "statistical" else ("probe",),
            build=functools.partial(build, point),
            profiles=frozenset(names | ({"tiny-full"} if max(r.num_keys for r in point.requests) < 100 else set())),
            faults=frozenset(point.catches),
            requires=computes_in(point.setting.dtype),
        )


def _pairs() -> Iterator[Point]:
    axes = {
        "scene": ("decode", "prefill", "chunked", "mixed", "draft4", "draft8"),
        "dtype": (F32, BF16, F16),
        "head": ((32, 32), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)),
        "group": ((2, 2), (4, 2), (6, 2), (5, 1), (7, 1), (16, 1), (32, 1)),
        "context": (1, 17, 64, 130, 513, 2049),
        "causal": (True, False),
        "window": (None, 1, 16, 129),
        "softcap": (None, 30.0, 50.0),
        "sinks": (False, True),
        "is_fused": (False, True),
    }
    for pick in pairwise(axes, lambda p: p["scene"] != "prefill" or p["context"] <= 130):
        (heads, kv_heads), (head_dim, v_head_dim) = pick["group"], pick["head"]
        setting = Setting(
            heads,
            kv_heads,
            head_dim,
            v_head_dim,
            pick["dtype"],
            pick["dtype"],
            causal=pick["causal"],
            window=pick["window"],
            softcap=pick["softcap"],
            sinks=pick["sinks"],
        )
        requests = scene(pick["scene"], pick["context"])
        yield Point("statistical", pick["scene"], requests, setting, pick["is_fused"], has_lse=True)


def _edge(name: str, requests: tuple[tuple[int, int], ...], *catches: str, **point: Any) -> Point:
    fields: dict[str, Any] = {"lane": "statistical", "has_lse": True} | point
    return Point(scene=name, requests=tuple(Request(*r) for r in requests), catches=catches, **fields)


def _edges() -> Iterator[Point]:
    for dtype in (F32, BF16, F16):
        setting = Setting(dtype=dtype, kv_dtype=dtype)
        yield _edge("plain", ((5, 37), (20, 20)), setting=setting, is_smoke=True)
        yield _edge("rows", ((5, 37), (3, 3), (1, 0)), setting=setting, lane="visible", has_lse=False, is_smoke=True)
        for head in ((32, 32), (64, 64), (128, 128), (192, 128), (256, 256)):
            wide = replace(setting, head_dim=head[0], v_head_dim=head[1])
            yield _edge("edges", ((1, 70), (8, 50), (1, 1)), setting=wide, lane="needle", has_lse=False)
    for causal in (True, False):
        for window in (None, 1, 15, 17):
            setting = Setting(causal=causal, window=window)
            catches = ("window-off-by-one",) if window == 15 else ()
            yield _edge("windows", ((4, 40), (3, 3)), *catches, setting=setting, lane="visible", has_lse=False)
            yield _edge("windows", ((4, 60), (8, 33)), *catches, setting=setting, lane="needle", has_lse=False)
    yield _edge("capped", ((3, 40), (1, 17)), "softcap-dropped", setting=Setting(softcap=30.0), is_smoke=True)
    yield _edge("sinks", ((3, 40), (1, 17)), "sink-dropped", "sink-wrong-head", setting=Setting(sinks=True))
    yield _edge("more-rows-than-keys", ((5, 3), (2, 2)))
    yield _edge("no-keys", ((2, 0), (3, 9), (0, 4), (0, 0), (1, 0)), is_smoke=True)
    yield _edge("only-no-keys", ((2, 0),))
    yield _edge("no-rows", ((0, 0), (0, 5)))
    yield _edge("encoder", ((33, 33), (70, 70)), setting=Setting(causal=False), is_fused=True)
    yield _edge("tiles", ((300, 300),), setting=Setting(2, 1))


def build(point: Point, draw: Draw) -> Trial:
    drawn = _drawn(point, draw)
    s, rows = point.setting, sum(r.num_rows for r in point.requests)
    some, every = sees_anything(s, point.requests)
    out_shape = (rows, s.heads, s.v_head_dim)
    q_strides = row_strides(drawn.q_THD.shape, 8) if point.is_fused else None
    tensors = [
        _starts("query_start_loc", [r.num_rows for r in point.requests]),
        _starts("kv_start_loc", [r.num_keys for r in point.requests]),
        given("q", drawn.q_THD, strides=q_strides),
        _joined("k", drawn.keys, point),
        _joined("v", drawn.values, point),
        wanted("out", out_shape, s.dtype, strides=row_strides(out_shape, 8) if point.is_fused else None,
               may_be_zero=not some),
    ]  # fmt: skip
    if point.has_lse:
        tensors.append(wanted("lse", (rows, s.heads), F32, is_finite=every, may_be_zero=True))
    if drawn.rule.sinks_H is not None:
        tensors.append(given("sinks", drawn.rule.sinks_H))
    return Trial(tuple(tensors), functools.partial(_run, point), drawn.check, is_empty=rows == 0)


def _drawn(point: Point, draw: Draw) -> Drawn:
    if point.lane == "needle":
        return draw_needle(draw, point.setting, point.requests, EDGE)
    if point.lane == "visible":
        return draw_visible(draw, point.setting, point.requests)
    return draw_statistical(draw, point.setting, point.requests, EDGE, point.has_lse)


def _starts(name: str, lengths: list[int]) -> HostTensor:
    return given(name, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32))


def _joined(name: str, parts: list[torch.Tensor], point: Point) -> HostTensor:
    """All requests' keys or values, then rows of NaN that belong to nobody."""
    s = point.setting
    tail = torch.full((TAIL_ROWS, *parts[0].shape[1:]), torch.nan, dtype=parts[0].dtype)
    x = torch.cat((*parts, tail))
    strides = (s.kv_heads * (s.head_dim + s.v_head_dim), x.shape[2], 1) if point.is_fused else None
    return given(name, x, strides=strides)


def _run(point: Point, bench: Bench) -> None:
    s = point.setting
    extra: dict[str, object] = {"lse": bench["lse"]} if point.has_lse else {}
    extra |= {"sinks_H": bench["sinks"]} if s.sinks else {}
    bench.op("attention", s.spec(1))(
        bench["q"],
        bench["k"],
        bench["v"],
        bench["query_start_loc"],
        bench["kv_start_loc"],
        out=bench["out"],
        causal=s.causal,
        softmax_scale=s.softmax_scale,
        window=s.window,
        softcap=s.softcap,
        **extra,
    )
