"""Batch invariance of what mixtures, adapters and latent attention add: see invariance.py, whose pieces these are.

grouped_gemm    pieces of the rows, each with the part of every segment that lies in it
lora_gemm       rows of several adapters alone and together; the base's output is the same for both
moe_route       ids and weights
mla_attention   requests by themselves, prompts in chunks, draft rows one by one
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.grid import grouped_gemm, lora_gemm, mla, moe_route
from octavo.conformance.grid.batch import Batch
from octavo.conformance.grid.invariance import (
    BATCHES,
    BF16,
    F16,
    F32,
    LANES,
    PIECES,
    PROFILES,
    ROWS,
    declares_invariance,
    in_pieces,
    is_many,
    judged_alone,
    pieces_of,
    spans,
)
from octavo.conformance.harness.bench import Bench
from octavo.conformance.trial import Trial, given

STORED = ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16))


def cases() -> Iterable[Case]:
    yield from _grouped_cases()
    yield from _lora_cases()
    yield from _route_cases()
    yield from _latent_cases()


# -- products of experts ----------------------------------------------------------------------------------------


def _grouped_cases() -> Iterable[Case]:
    for dtype, stored in STORED:
        for experts, segments, gate in ((8, "ragged", None), (8, "empty", "silu"), (60, "ragged", None)):
            point = grouped_gemm.Point("statistical", dtype, stored, experts, ROWS, segments, k=576, gate=gate)  # type: ignore[arg-type]
            yield Case(
                name=f"invariance.grouped_gemm/{point.name.partition('/')[2]}",
                op="grouped_gemm",
                spec=point.spec,
                axes={
                    "dtype": dtype_name(dtype),
                    "weight": dtype_name(stored),
                    "experts": str(experts),
                    "segments": segments,
                    "epilogue": gate or "none",
                },
                lanes=LANES,
                build=functools.partial(build_grouped, point),
                profiles=PROFILES,
                faults=frozenset({"grouped-gemm-split-k-by-batch"} if dtype == stored == F32 else ()),
                requires=all_of(declares_invariance, computes_in(dtype), stores_weights_in(stored)),
            )


def build_grouped(point: grouped_gemm.Point, draw: Draw) -> Trial:
    trial = grouped_gemm.build_statistical(point, draw)
    (bounds,) = (tensor.data for tensor in trial.tensors if tensor.name == "segment_start")
    assert bounds is not None  # It is given.
    parts = {rows.start: bounds.clamp(rows.start, rows.stop) - rows.start for rows in spans(PIECES)}

    def piece(bench: Bench, rows: slice) -> None:
        op = bench.op("grouped_gemm", point.spec)
        weights = [bench.weight(f"w{e}") for e in range(point.experts)]
        op(bench["x"][rows], weights, bench[f"segments.{rows.start}"], out=bench["alone"][rows], gate=point.gate)

    tensors = (*trial.tensors, *(given(f"segments.{start}", part) for start, part in parts.items()))
    return in_pieces(replace(trial, tensors=tensors), piece)


# -- adapters ---------------------------------------------------------------------------------------------------


def _lora_cases() -> Iterable[Case]:
    for dtype in (F32, BF16, F16):
        for ranks, k, n in (((16,), 576, 96), ((8, 64), 1000, 33)):
            point = lora_gemm.Point("statistical", dtype, ROWS, k, n, ranks)
            yield Case(
                name=f"invariance.lora_gemm/{point.name.partition('/')[2]}",
                op="lora_gemm",
                spec=point.spec,
                axes={"dtype": dtype_name(dtype), "rank": str(max(ranks)), "adapters": str(len(ranks))},
                lanes=LANES,
                build=functools.partial(build_lora, point),
                profiles=PROFILES,
                faults=frozenset({"lora-split-k-by-batch"} if dtype == F32 else ()),
                requires=all_of(declares_invariance, computes_in(dtype)),
            )


def build_lora(point: lora_gemm.Point, draw: Draw) -> Trial:
    def piece(bench: Bench, rows: slice) -> None:
        lora_gemm.call(point, bench, rows, "alone")

    return in_pieces(lora_gemm.build_statistical(point, draw), piece)


# -- routing ----------------------------------------------------------------------------------------------------


def _route_cases() -> Iterable[Case]:
    for dtype in (F32, BF16, F16):
        for experts, top_k, scoring in ((8, 2, "softmax"), (60, 4, "softmax"), (256, 8, "sigmoid")):
            point = moe_route.Point(ROWS, experts, top_k, dtype, scoring)
            yield Case(
                name=f"invariance.moe_route/{point.name.partition('/')[2]}",
                op="moe_route",
                spec=point.spec,
                axes={
                    "dtype": dtype_name(dtype),
                    "experts": str(experts),
                    "top_k": str(top_k),
                    "scoring": scoring,
                },
                lanes=LANES,
                build=functools.partial(build_route, point),
                profiles=PROFILES,
                faults=frozenset({"moe-route-other-sum-by-batch"} if dtype == F32 and scoring == "softmax" else ()),
                requires=all_of(declares_invariance, computes_in(dtype)),
            )


def build_route(point: moe_route.Point, draw: Draw) -> Trial:
    def piece(bench: Bench, rows: slice) -> None:
        op = bench.op("moe_route", point.spec)
        alone = {f"out_{name}": bench[f"alone.{name}"][rows] for name in ("weights", "ids")}
        op(bench["logits"][rows], bias_E=None, **alone, **point.rule)

    return in_pieces(moe_route.build(point, draw), piece, outputs={"weights": "alone.weights", "ids": "alone.ids"})


# -- latent attention -------------------------------------------------------------------------------------------


def _latent_cases() -> Iterable[Case]:
    for dtype, kv_dtype in STORED:
        for batch, (requests, _) in BATCHES.items():
            point = mla.Point("statistical", batch, requests, 8, dtype, kv_dtype, rank=64, rope=16)
            yield Case(
                name=f"invariance.mla_attention/{point.name.partition('/')[2]}",
                op="mla_attention",
                spec=point.spec,
                axes={
                    "dtype": dtype_name(dtype),
                    "kv": dtype_name(kv_dtype),
                    "heads": str(point.heads),
                    "head": f"{point.rank + point.rope}/{point.rank}",
                    "batch": batch,
                    "context": str(max(r.num_keys for r in requests)),
                },
                lanes=LANES,
                build=functools.partial(build_latent, point),
                profiles=PROFILES,
                faults=frozenset({"mla-splits-by-batch"} if is_many(dtype, kv_dtype, batch) else ()),
                requires=all_of(declares_invariance, computes_in(dtype), stores_kv_in(kv_dtype)),
            )


def build_latent(point: mla.Point, draw: Draw) -> Trial:
    trial, batch = mla.build_with_batch(point, draw)
    pieces = pieces_of(batch, BATCHES[point.scene][1])

    def run(bench: Bench) -> None:
        trial.run(bench)
        for prefix, part, rows in pieces:
            _attend(point, bench, part, prefix, rows)

    extra = [tensor for prefix, part, _ in pieces for tensor in part.tensors(prefix)]
    return judged_alone(replace(trial, tensors=(*trial.tensors, *extra)), run)


def _attend(point: mla.Point, bench: Bench, part: Batch, prefix: str, rows: slice) -> None:
    bench.op("mla_attention", point.spec)(
        bench["q_latent"][rows],
        bench["q_rope"][rows],
        bench.kv("kv"),
        bench.plan(part.metadata(bench, prefix)),
        out=bench["alone"][rows],
        softmax_scale=point.softmax_scale,
    )
