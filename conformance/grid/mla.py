"""Multi-head latent attention in its absorbed form, over paged latents.

    one slot           [ latent C | rotary key R ]       shared by all heads; V is the latent
    mla.statistical/…  normal numbers
    mla.needle/…       ±1 codes as latents: the output is one key's latent, bit for bit

Heads per rank: 8, 12, 16, 32, 64, 128; queries of 1 to 8 tokens; caches in 8, 16 and 32 bits. Writes of latents and
the comparison with plain attention stand in mla_parts.py.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import FP8, judged
from octavo.conformance.grid.batch import SPARE_BLOCKS, Batch, Request, lay_out, scene
from octavo.conformance.grid.needle import find_needles
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes import probe
from octavo.conformance.oracle.attention import Attended, Rule
from octavo.conformance.oracle.mla import mla_attend
from octavo.conformance.oracle.quantise import decode
from octavo.conformance.trial import HostPool, HostTensor, Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import AttentionSpec, KVCacheSpec, KVLayout

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = ((F32, F32), (F32, BF16), (BF16, BF16), (F16, F16), (BF16, FP8[0]), (BF16, FP8[1]))


@dataclass(frozen=True)
class Point:
    """heads H; rank C and rope R; gap: elements between rows of q and of out; candidates: block ids of a big pool."""

    lane: str
    scene: str
    requests: tuple[Request, ...]
    heads: int
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    rank: int = 512
    rope: int = 64
    block_size: int = 16
    gap: int = 0
    has_lse: bool = False
    catches: tuple[str, ...] = ()
    candidates: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        context = max(r.num_keys for r in self.requests)
        kv = "" if self.kv_dtype == self.dtype else f".{dtype_name(self.kv_dtype)}"
        parts = [f"{self.scene}.{context}", dtype_name(self.dtype) + kv, f"h{self.heads}c{self.rank}r{self.rope}"]
        parts += [f"b{self.block_size}"] + ([f"gap{self.gap}"] if self.gap else []) + (["lse"] if self.has_lse else [])
        return f"mla.{self.lane}/{'-'.join(parts)}"

    @property
    def softmax_scale(self) -> float:
        return 1 / math.sqrt(self.rank // 4 + self.rope)

    @property
    def spec(self) -> AttentionSpec:
        width = self.rank + self.rope
        return AttentionSpec(self.heads, 1, width, self.rank, self.dtype, self.kv_dtype, self.block_size, KVLayout.MLA)


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op="mla_attention",
            spec=point.spec,
            axes={
                "dtype": dtype_name(point.dtype),
                "kv": dtype_name(point.kv_dtype),
                "heads": str(point.heads),
                "head": f"{point.rank + point.rope}/{point.rank}",
                "block": str(point.block_size),
                "batch": point.scene,
                "context": str(max(r.num_keys for r in point.requests)),
                "stride": "strided" if point.gap else "dense",
            },
            lanes=("statistical",) if point.lane == "statistical" else ("probe",),
            build=functools.partial(build, point),
            profiles=frozenset({"mla", "fp8kv"} if point.kv_dtype in FP8 else {"mla"}),
            faults=frozenset(point.catches),
            requires=all_of(computes_in(point.dtype), stores_kv_in(point.kv_dtype)),
        )


def _points() -> Iterator[Point]:
    for (dtype, kv_dtype), heads in itertools.product(DTYPES, (8, 12, 16, 32, 64, 128)):
        at = functools.partial(Point, heads=heads, dtype=dtype, kv_dtype=kv_dtype)
        catches = ("mla-12-heads",) if heads == 12 and dtype == F32 else ()
        yield at("statistical", "mixed", scene("mixed", 70), has_lse=True, catches=catches)
        yield at("needle", "decode", scene("decode", 70), catches=catches)
    for dtype, kv_dtype in DTYPES:
        at = functools.partial(Point, dtype=dtype, kv_dtype=kv_dtype)
        for rows in (1, 2, 4, 8):
            catches = ("mla-8-token-queries",) if rows == 8 and dtype == F32 else ()
            drafts = (Request(rows, 40), Request(rows, rows))
            yield at("statistical", f"draft{rows}", drafts, 16, has_lse=True, catches=catches)
            yield at("needle", f"draft{rows}", drafts, 12, catches=catches)
        for block_size in (1, 32, 64, 128):
            yield at("statistical", "chunked", scene("chunked", 130), 8, block_size=block_size)
            yield at("needle", "chunked", (Request(3, block_size + 3), Request(2, 70)), 8, block_size=block_size)
    for context in (1, 15, 16, 17, 513, 2049, 4096):
        yield Point("statistical", "one", (Request(1, context),), 8, has_lse=True)
    no_keys = (Request(1, 20), Request(0, 0), Request(1, 0), Request(3, 18))
    yield Point("statistical", "no-keys", no_keys, 8, has_lse=True)
    for rank, rope in ((32, 8), (64, 16), (256, 32)):
        yield Point("statistical", "mixed", scene("mixed", 40), 8, rank=rank, rope=rope, has_lse=True, gap=8)
    far = (*range(65_537, 65_545), *range(70_000, 70_000 + SPARE_BLOCKS))
    yield Point("needle", "ids-beyond-2e16", (Request(1, 40),), 8, rank=32, rope=8,
                catches=("block-id-16-bit",), candidates=far)  # fmt: skip


def build(point: Point, draw: Draw) -> Trial:
    return build_with_batch(point, draw)[0]


def build_with_batch(point: Point, draw: Draw) -> tuple[Trial, Batch]:
    """The trial, and where its requests lie."""
    batch = lay_out(draw, point.requests, point.block_size, candidates=point.candidates or None)
    if point.lane == "needle":
        q, latents, want = _needles(point, draw)
    else:
        q = draw.normal(batch.num_tokens, point.heads, point.rank + point.rope, mean=0.1, dtype=point.dtype)
        latents = [_latent(point, draw, r.num_keys) for r in point.requests]

    @functools.cache
    def found() -> Attended:
        wide = [decode(x) if point.kv_dtype in FP8 else x for x in latents]
        lens = [r.num_rows for r in point.requests]
        return mla_attend(q[..., : point.rank], q[..., point.rank :], wide, lens, point.softmax_scale)

    def check(outputs: Outputs) -> list[Finding]:
        if point.lane == "needle":
            return [probe.found("out", outputs["out"], want)]
        return judged(outputs, found(), point.rank + point.rope, point.dtype, lse=point.has_lse)

    pool = latent_pool(batch, latents, point.kv_dtype, is_lazy=bool(point.candidates))
    run = functools.partial(_run, point, batch)
    return Trial(tuple(_tensors(point, batch, q)), run, check, pools=(pool,)), batch


def _latent(point: Point, draw: Draw, length: int) -> torch.Tensor:
    return draw.normal(length, point.rank + point.rope, mean=0.1, dtype=point.kv_dtype)


def latent_pool(
    batch: Batch, latents: Sequence[torch.Tensor], dtype: torch.dtype, *, is_lazy: bool = False
) -> HostPool:
    """The batch's latents [L, C + R] in blocks; values are empty. A lazy pool has poison where 16 bits would lead."""
    keys = [x[:, None, :] for x in latents]
    blocks = batch.blocks(keys, [k[..., :0] for k in keys])
    for block in list(blocks) if is_lazy else []:
        blocks.setdefault(block & 0xFFFF, None)
    spec = KVCacheSpec(1, latents[0].shape[1], 0, dtype, batch.block_size)
    return HostPool("kv", spec, batch.num_blocks, blocks, is_lazy=is_lazy)


def _needles(point: Point, draw: Draw) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Codes are keys and values alike, so the winner's latent is its code."""
    latents, queries, wants = [], [], []
    for request in point.requests:
        needle = find_needles(request, point.block_size, Rule(point.softmax_scale), point.heads, draw)
        codes = probe.needle_codes(
            draw, request.num_keys, point.rank + point.rope, list(needle.targets), dict(needle.decoys)
        )
        make = functools.partial(probe.needle_query, codes, softmax_scale=point.softmax_scale, has_decoy=True)
        for chosen, winners in zip(needle.chosen, needle.winners, strict=True):
            queries.append(torch.stack([make(target=t) for t in chosen if t is not None]))
            wants.append(torch.stack([codes[w, : point.rank] for w in winners if w is not None]))
        latents.append(codes.to(point.kv_dtype))
    return torch.stack(queries).to(point.dtype), latents, torch.stack(wants).to(point.dtype)


def _tensors(point: Point, batch: Batch, q: torch.Tensor) -> list[HostTensor]:
    rows = batch.num_tokens
    q_latent, q_rope = q[..., : point.rank], q[..., point.rank :]
    shape = (rows, point.heads, point.rank)
    # The two parts of a query come out of different products: dense each, or apart.
    strides = (
        (row_strides(q_latent.shape, point.gap), row_strides(q_rope.shape, point.gap)) if point.gap else (None,) * 2
    )
    tensors = [*batch.tensors(), given("q_latent", q_latent, strides=strides[0])]
    tensors += [given("q_rope", q_rope, strides=strides[1]), wanted("out", shape, point.dtype, strides=strides[0])]
    every = all(r.num_keys >= r.num_rows for r in point.requests)
    return tensors + ([wanted("lse", shape[:2], F32, is_finite=every)] if point.has_lse else [])


def _run(point: Point, batch: Batch, bench: Bench) -> None:
    extra = {"lse": bench["lse"]} if point.has_lse else {}
    plan = bench.plan(batch.metadata(bench))
    bench.op("mla_attention", point.spec)(
        bench["q_latent"],
        bench["q_rope"],
        bench.kv("kv"),
        plan,
        out=bench["out"],
        softmax_scale=point.softmax_scale,
        **extra,
    )
