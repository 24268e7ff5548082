"""What stands round absorbed attention: writes of latents, and the plain form that it must agree with.

    mla.write/…   exact: [latent | rotary key] at its slot, rounded to the cache's dtype; -1 writes nothing
    mla.plain/…   absorbed                              plain
                  q_latent = q_nope · Wuk   [H, C]      k = latent · Wukᵀ   [L, H, N]
                  out = (attention over latents) · Wuv  v = latent · Wuvᵀ   [L, H, V]

Projections hold small integers and latents few bits, so that q_latent, k and v are exact in fp32: both forms then
have the very same scores, and differ by their own roundings alone.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import FP8, Setting
from octavo.conformance.grid.batch import Batch, Request, lay_out
from octavo.conformance.grid.mla import DTYPES, latent_pool
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import Bound
from octavo.conformance.oracle.attention import Rule, attend
from octavo.conformance.oracle.mla import mla_attend
from octavo.conformance.oracle.quantise import round_to_fp8
from octavo.conformance.trial import HostPool, Outputs, Trial, given, row_strides, wanted
from octavo.core.backend import AttentionSpec, CacheSpec, KVCacheSpec, KVLayout

F32 = torch.float32


def cases() -> Iterable[Case]:
    for dtype, kv_dtype in DTYPES:
        for write in (
            Write(dtype, kv_dtype),
            Write(dtype, kv_dtype, 512, 64, 64, gap=16),
            Write(dtype, kv_dtype, 1, 1, 1),
        ):
            catches = {"slot-minus-one-last-slot"} if dtype == kv_dtype == F32 else set()
            yield Case(
                name=write.name,
                op="write_mla",
                spec=write.spec,
                axes={"dtype": dtype_name(dtype), "kv": dtype_name(kv_dtype), "block": str(write.block_size)},
                lanes=("exact",),
                build=functools.partial(build_write, write),
                profiles=frozenset({"mla", "fp8kv"} if kv_dtype in FP8 else {"mla"}),
                faults=frozenset(catches),
                requires=all_of(computes_in(dtype), stores_kv_in(kv_dtype)),
            )
    for plain in (Plain(8), Plain(12, (Request(8, 8), Request(1, 70))), Plain(16, (Request(3, 130),))):
        yield Case(
            name=plain.name,
            op="mla_attention",
            spec=plain.spec,
            axes={"dtype": "float32", "kv": "float32", "heads": str(plain.heads), "batch": "plain"},
            lanes=("statistical",),
            build=functools.partial(build_plain, plain),
            profiles=frozenset({"mla"}),
            requires=all_of(computes_in(F32), stores_kv_in(F32)),
        )


@dataclass(frozen=True)
class Write:
    """Latents of C + R elements into blocks; gap: elements between rows."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    rank: int = 32
    rope: int = 8
    block_size: int = 16
    gap: int = 0

    @property
    def name(self) -> str:
        kv = "" if self.kv_dtype == self.dtype else f".{dtype_name(self.kv_dtype)}"
        gap = f"-gap{self.gap}" if self.gap else ""
        return f"mla.write/{dtype_name(self.dtype)}{kv}-c{self.rank}r{self.rope}-b{self.block_size}{gap}"

    @property
    def spec(self) -> CacheSpec:
        width = self.rank + self.rope
        return CacheSpec(1, width, 0, self.dtype, self.kv_dtype, self.block_size, KVLayout.MLA)


def build_write(point: Write, draw: Draw) -> Trial:
    num_blocks, rows = 7, 12
    # The pool's last slot stays unwritten: it is where -1 leads when it counts from the end.
    slots = torch.tensor(draw.permutation(num_blocks * point.block_size - 1)[:rows], dtype=torch.int64)
    slots[torch.tensor([2, slots.numel() - 1])] = -1
    count = slots.numel()
    latent = draw.normal(count, point.rank, dtype=point.dtype)
    rope = draw.normal(count, point.rope, std=4.0, dtype=point.dtype)
    spec = KVCacheSpec(1, point.rank + point.rope, 0, point.kv_dtype, point.block_size)
    kept = slots[slots >= 0]
    blocks = dict.fromkeys((kept // point.block_size).tolist())
    pool = HostPool("kv", spec, num_blocks, blocks, frozenset(kept.tolist()))
    tensors = (
        given("latent", latent, strides=row_strides(latent.shape, point.gap) if point.gap else None),
        given("rope", rope, strides=row_strides(rope.shape, point.gap) if point.gap else None),
        given("slots", slots),
    )

    def run(bench: Bench) -> None:
        bench.op("write_mla", point.spec)(bench["latent"], bench["rope"], bench.kv("kv"), bench["slots"])

    def check(outputs: Outputs) -> list[Finding]:
        rows = torch.cat((latent, rope), dim=1)[slots >= 0][kept.argsort()][:, None, :]
        want = rows.double()
        if point.kv_dtype in FP8:
            want = round_to_fp8(want, is_fnuz=point.kv_dtype == torch.float8_e4m3fnuz)
        return [exact("kv.key", outputs["kv.key"], want.to(F32))]

    return Trial(tensors, run, check, pools=(pool,))


@dataclass(frozen=True)
class Plain:
    """Both forms over one batch; N = V = 16 per head, C = 32, R = 8, all in fp32."""

    heads: int
    requests: tuple[Request, ...] = (Request(1, 40), Request(5, 33), Request(8, 20))
    rank: int = 32
    rope: int = 8
    nope: int = 16
    block_size: int = 16

    @property
    def name(self) -> str:
        return f"mla.plain/float32-h{self.heads}-t{sum(r.num_rows for r in self.requests)}"

    @property
    def spec(self) -> AttentionSpec:
        width = self.rank + self.rope
        return AttentionSpec(self.heads, 1, width, self.rank, F32, F32, self.block_size, KVLayout.MLA)

    @property
    def softmax_scale(self) -> float:
        """Scores of integers to ±3 over N elements have a deviation of some 4√N."""
        return 1 / (4 * math.sqrt(self.nope))

    @property
    def setting(self) -> Setting:
        """Of the plain form."""
        return Setting(self.heads, self.heads, self.nope + self.rope, self.nope)


@dataclass(frozen=True)
class Projected:
    """One batch in both forms: what is given to the ops, and the projection that leads from latents to values."""

    q_nope: torch.Tensor
    q_latent: torch.Tensor
    q_rope: torch.Tensor
    latents: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    wuv_HVC: torch.Tensor

    @property
    def q(self) -> torch.Tensor:
        """Of the plain form."""
        return torch.cat((self.q_nope, self.q_rope), dim=-1)


def _project(point: Plain, draw: Draw) -> Projected:
    rows = sum(r.num_rows for r in point.requests)
    q_nope = draw.integers(-3, 3, rows, point.heads, point.nope)
    wuk, wuv = (draw.integers(-3, 3, point.heads, point.nope, point.rank) for _ in range(2))
    # Nine bits of latent, two of a weight and five of the sum over C: well within fp32's 24.
    latents = [draw.integers(-255, 255, r.num_keys, point.rank) / 256 for r in point.requests]
    ropes = [draw.normal(r.num_keys, point.rope) for r in point.requests]
    return Projected(
        q_nope,
        torch.einsum("thn,hnc->thc", q_nope, wuk),
        draw.normal(rows, point.heads, point.rope),
        [torch.cat(pair, dim=-1) for pair in zip(latents, ropes, strict=True)],
        [
            torch.cat((torch.einsum("lc,hnc->lhn", c, wuk), r[:, None].expand(-1, point.heads, -1)), dim=-1)
            for c, r in zip(latents, ropes, strict=True)
        ],
        [torch.einsum("lc,hvc->lhv", c, wuv) for c in latents],
        wuv,
    )


def build_plain(point: Plain, draw: Draw) -> Trial:
    batch = lay_out(draw, point.requests, point.block_size)
    x = _project(point, draw)
    starts = [0, *itertools.accumulate(r.num_keys for r in point.requests)]
    tensors = [
        *batch.tensors(),
        given("q_latent", x.q_latent),
        given("q_rope", x.q_rope),
        given("q", x.q),
        given("k", torch.cat(x.keys)),
        given("v", torch.cat(x.values)),
        given("kv_start_loc", torch.tensor(starts, dtype=torch.int32)),
        wanted("absorbed", x.q_latent.shape, F32),
        wanted("plain", x.q_nope.shape, F32),
    ]
    pool = latent_pool(batch, x.latents, F32)
    check = functools.partial(_check_plain, point, x)
    return Trial(tuple(tensors), functools.partial(_run_plain, point, batch), check, pools=(pool,))


def _check_plain(point: Plain, x: Projected, outputs: Outputs) -> list[Finding]:
    """Each form against its oracle, and the one against the other with both their bounds."""
    lens = [r.num_rows for r in point.requests]
    absorbed = mla_attend(x.q_latent, x.q_rope, x.latents, lens, point.softmax_scale)
    plain = attend(x.q, x.keys, x.values, lens, Rule(point.softmax_scale))
    absorbed_bound = absorbed.out_bound(point.rank + point.rope, F32)
    plain_bound = plain.out_bound(point.nope + point.rope, F32)
    wuv = x.wuv_HVC.double()
    unfold = functools.partial(torch.einsum, "thc,hvc->thv")
    between = Bound(
        unfold(absorbed_bound.element, wuv.abs()) + plain_bound.element,
        unfold(absorbed_bound.sigma, wuv.abs()) + plain_bound.sigma,
        2 * plain_bound.unit,
    )
    unfolded = unfold(outputs["absorbed"].double(), wuv)
    return [
        statistical("absorbed", outputs["absorbed"], absorbed.out, absorbed_bound),
        statistical("plain", outputs["plain"], plain.out, plain_bound),
        statistical("absorbed against plain", unfolded, outputs["plain"].double(), between),
    ]


def _run_plain(point: Plain, batch: Batch, bench: Bench) -> None:
    plan = bench.plan(batch.metadata(bench))
    bench.op("mla_attention", point.spec)(
        bench["q_latent"],
        bench["q_rope"],
        bench.kv("kv"),
        plan,
        out=bench["absorbed"],
        softmax_scale=point.softmax_scale,
    )
    bench.op("attention", point.setting.spec(1))(
        bench["q"], bench["k"], bench["v"], bench["query_start_loc"], bench["kv_start_loc"],
        out=bench["plain"], softmax_scale=point.softmax_scale,
    )  # fmt: skip
