"""Writes into the KV cache: exact in every dtype, with slots in any order, -1 among them.

    write_kv/…       row t of k and v to slot_mapping[t], rounded to nearest even; K's and V's scales differ
    rope_write_kv/…  the rotated k instead; q rotated into out_q

    x        ordinary numbers, ties between two stored values (row 0), what saturates an 8-bit cache (row 1)
    slots    shuffled over the pool; -1 for some rows; fewer slots than rows in some cases
    pool     poison, block 0 and the last slot never written: -1 taken literally, or for the last, shows

8-bit caches: bit for bit where the scale is a power of two, else within one code. rope_write_kv is exact where every
angle is a quarter turn, and statistical elsewhere.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, computes_in, holds_bytes, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import FP8, ONE_BYTE_PROFILES
from octavo.conformance.grid.pairwise import pairwise
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.oracle.quantise import LARGEST, codes_apart, fp8_values, round_to_fp8
from octavo.conformance.trial import HostPool, HostTensor, Outputs, Trial, given
from octavo.core.backend import CacheSpec, KVCacheSpec, KVLayout, QuantFormat, ScaleKind

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3FN, E4M3FNUZ = FP8
DTYPES = ((F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16))
SHAPES = ((2, 64, 64), (1, 32, 32), (8, 128, 128), (3, 80, 80), (2, 192, 128), (1, 256, 256), (5, 1, 3))
"""KV heads, head size of K and of V."""

SCALED: tuple[ScaleKind, ...] = ("tensor", "head")
FORMATS = {E4M3FN: QuantFormat.FP8_E4M3FN, E4M3FNUZ: QuantFormat.FP8_E4M3FNUZ, torch.int8: QuantFormat.INT8}


@dataclass(frozen=True)
class Point:
    """A point of the grid.

    Attributes:
        rows: of k and v. surplus: rows at the end that have no slot.
        is_fused: k and v share a row.
        is_power_of_two: the scales are.
        big: block ids and pool of one that passes 2^31 bytes and 2^16 blocks.
    """

    dtype: torch.dtype = F32
    kv_dtype: torch.dtype = F32
    shape: tuple[int, int, int] = (2, 64, 64)
    block_size: int = 16
    rows: int = 12
    surplus: int = 0
    is_fused: bool = False
    has_gaps: bool = False
    kv_scale: ScaleKind = "none"
    is_power_of_two: bool = True
    is_big: bool = False
    catches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        kv = "" if self.kv_dtype == self.dtype else f".{dtype_name(self.kv_dtype)}"
        parts = [dtype_name(self.dtype) + kv, "k{}d{}v{}".format(*self.shape), f"b{self.block_size}", f"t{self.rows}"]
        parts += [f"surplus{self.surplus}"] if self.surplus else []
        parts += ["fused"] if self.is_fused else []
        parts += ["gaps"] if self.has_gaps else []
        parts += [] if self.kv_scale == "none" else [f"scale.{self.kv_scale}"]
        parts += [] if self.is_power_of_two else ["odd"]
        return "-".join(parts + (["beyond-2e31"] if self.is_big else []))

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec(*self.shape, self.dtype, self.kv_dtype, self.block_size, KVLayout.NHD, kv_scale=self.kv_scale)

    @property
    def profiles(self) -> frozenset[str]:
        if self.is_big:
            return frozenset()
        if self.kv_dtype in ONE_BYTE_PROFILES:
            return ONE_BYTE_PROFILES[self.kv_dtype]
        names = {"core", "deterministic", "tiny-full"}
        return frozenset(names | ({"smoke", "tiny"} if self.shape == (2, 64, 64) and self.rows == 12 else set()))

    def axes(self) -> dict[str, str]:
        return {
            "dtype": dtype_name(self.dtype),
            "kv": dtype_name(self.kv_dtype),
            "head": "{1}/{2}".format(*self.shape),
            "block": str(self.block_size),
            "scale": self.kv_scale,
            "stride": "strided" if self.is_fused or self.has_gaps else "dense",
        }


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(itertools.chain(_edges(), _pairs(), _eight_bit())):
        yield Case(
            name=f"write_kv/{point.name}",
            op="write_kv",
            spec=point.spec,
            axes=point.axes(),
            lanes=("exact",),
            build=functools.partial(build, point),
            profiles=point.profiles,
            faults=frozenset(point.catches),
            requires=all_of(
                computes_in(point.dtype), stores_kv_in(point.kv_dtype), holds_bytes(2**31 if point.is_big else 0)
            ),
            is_large=point.is_big,
        )


def _edges() -> Iterator[Point]:
    yield Point(catches=("slot-minus-one-last-slot", "interleaved-kv-as-contiguous"))
    yield Point(surplus=5, catches=("more-keys-than-slots",))
    for dtype, kv_dtype in DTYPES:
        at = functools.partial(Point, dtype, kv_dtype)
        yield at(surplus=4, is_fused=True)
        strided = ("strided-kv-as-contiguous", "kv-pad-written")
        yield at(has_gaps=True, catches=strided if dtype == kv_dtype == F32 else ())
        yield at(rows=1)
        yield at(rows=0)
        yield at(rows=700, block_size=256)
    # 2^15 bytes a block: byte 2^31 begins block 2^16.
    yield Point(F32, F16, (8, 64, 64), is_big=True, catches=("slot-index-32-bit",))


def _pairs() -> Iterator[Point]:
    axes = {
        "dtypes": DTYPES,
        "shape": SHAPES,
        "block_size": (1, 16, 32, 64, 128, 256),
        "rows": (1, 5, 33, 300),
        "is_fused": (False, True),
        "has_gaps": (False, True),
    }
    for pick in pairwise(axes):
        dtype, kv_dtype = pick.pop("dtypes")
        yield Point(dtype, kv_dtype, **pick)


def _eight_bit() -> Iterator[Point]:
    """Floats with and without scales, integers with them."""
    scales = ("kv-scales-ignored", "kv-scales-swapped")
    for dtype, kv_dtype in itertools.product((F32, BF16, F16), FP8):
        flavour = ("fnuz-read-as-fn",) if kv_dtype == E4M3FNUZ else ()
        at = functools.partial(Point, dtype, kv_dtype)
        yield at()
        for kv_scale in SCALED:
            catches = (*scales, *flavour) if dtype == F32 else ()
            yield at(kv_scale=kv_scale, catches=catches)
            yield at(kv_scale=kv_scale, is_power_of_two=False)
            yield at((3, 80, 80), 32, 40, kv_scale=kv_scale, is_fused=True, has_gaps=True)
    for dtype, kv_scale in itertools.product((F32, BF16, F16), SCALED):
        codes = (*scales, "int8-kv-truncated", "int8-kv-wrapped") if dtype == F32 else ()
        at = functools.partial(Point, dtype, torch.int8, kv_scale=kv_scale)
        yield at(catches=codes)
        yield at(is_power_of_two=False)
        yield at((3, 80, 80), 32, 40, is_fused=True, has_gaps=True)


def build(point: Point, draw: Draw) -> Trial:
    heads, head_dim, v_head_dim = point.shape
    scales = kv_scales(point)
    k = ordinary_and_edges(point, draw, head_dim, scales.get("k_scale"))
    v = ordinary_and_edges(point, draw, v_head_dim, scales.get("v_scale"))
    slots, pool = slots_and_pool(point, draw)
    strides = (heads * (head_dim + v_head_dim),) if point.is_fused else None
    tensors: list[HostTensor] = [given("slots", slots)]
    for name, x in (("k", k), ("v", v)):
        tensors.append(given(name, x, strides=(*strides, x.shape[2], 1) if strides else None))
    tensors += [given(name, x) for name, x in scales.items()]

    def run(bench: Bench) -> None:
        extra = {name: bench[name] for name in scales}
        bench.op("write_kv", point.spec)(bench["k"], bench["v"], bench.kv("kv"), bench["slots"], **extra)

    def check(outputs: Outputs) -> list[Finding]:
        return [
            stored_right(point, f"kv.{part}", outputs, x, slots, scales.get(f"{part[0]}_scale"))
            for part, x in (("key", k), ("value", v))
            if pool.written
        ]

    return Trial(tuple(tensors), run, check, pools=(pool,), is_empty=not pool.written)


def ordinary_and_edges(point: Point, draw: Draw, width: int, scale: torch.Tensor | None = None) -> torch.Tensor:
    """[T, K, width]: row 0 lies between two stored values, row 1 beyond the largest 8-bit one."""
    shape = (point.rows + point.surplus, point.shape[0], width)
    x = draw.normal(*shape, std=3.0)
    if point.kv_dtype == torch.int8:
        assert scale is not None
        x *= 10 * scale[:, None]  # much of the codes' range
        if point.rows > 0:
            halves = draw.integers(0, 90, *shape[1:], dtype=torch.int64) + 0.5
            x[0] = halves * draw.signs(*shape[1:]) * scale[:, None]
    elif point.rows > 0 and point.kv_dtype in FP8:
        codes = fp8_values(is_fnuz=point.kv_dtype == E4M3FNUZ)[8:100]
        at = draw.integers(0, 90, *shape[1:], dtype=torch.int64)
        x[0] = ((codes[at] + codes[at + 1]) / 2).float() * draw.signs(*shape[1:])
    elif point.rows > 0 and point.kv_dtype != point.dtype:
        # A set half bit and nothing below it: a tie, which goes to the even neighbour.
        half = {BF16: 0x8000, F16: 0x1000}[point.kv_dtype]
        x[0] = ((x[0].view(torch.int32) & ~(2 * half - 1)) | half).view(F32)
    if point.rows > 1 and point.kv_dtype in ONE_BYTE_PROFILES:
        x[1] = draw.signs(*shape[1:]) * 30_000
    return x.to(point.dtype)


def slots_and_pool(point: Point, draw: Draw) -> tuple[torch.Tensor, HostPool]:
    """[T] int64 with some -1, and the pool; slots lie anywhere but in block 0 and at the pool's very end."""
    heads, head_dim, v_head_dim = point.shape
    S = point.block_size
    spec = KVCacheSpec(heads, head_dim, v_head_dim, point.kv_dtype, S)
    if point.is_big:
        edges = [2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1]
        pool_slots = [block * S + offset for block in edges for offset in (0, S - 1)]
        num_blocks = 2**16 + 3
    else:
        num_blocks = -(-point.rows // S) + 3
        pool_slots = list(range(S, num_blocks * S - 1))
    order = draw.permutation(len(pool_slots))[: point.rows]
    slots = torch.tensor([pool_slots[i] for i in order], dtype=torch.int64)
    slots[3::7] = -1
    written = frozenset(slots[slots >= 0].tolist())
    blocks = dict.fromkeys(slot // S for slot in written)
    for block in list(blocks) if point.is_big else []:
        blocks.setdefault(block & 0x7FFF, None)
    pad = 16 * (spec.block_bytes // 32) + 64 if point.has_gaps else 0
    return slots, HostPool("kv", spec, num_blocks, blocks, written, pad_bytes=pad, is_lazy=point.is_big)


def kv_scales(point: Point) -> dict[str, torch.Tensor]:
    """By the op's names; empty without scales."""
    if point.kv_scale == "none":
        return {}
    heads = torch.arange(point.shape[0] if point.kv_scale == "head" else 1, dtype=torch.float32)
    if point.is_power_of_two:
        return {"k_scale": torch.exp2(-2 - heads), "v_scale": torch.exp2(1 + heads % 2)}
    return {"k_scale": 0.37 + 0.1 * heads, "v_scale": 1.7 / (1 + heads)}


def stored_right(
    point: Point,
    name: str,
    outputs: Outputs,
    x_TKD: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None,
) -> Finding:
    """What the written slots hold, in ascending order, against the rows that went there."""
    kept = slots >= 0
    want = x_TKD[: slots.numel()][kept][slots[kept].argsort()]
    if point.kv_dtype not in FORMATS:
        return exact(name, outputs[name], want)
    wide = want.double() if scale is None else want.double() / scale.double()[:, None]
    limit = LARGEST[FORMATS[point.kv_dtype]]
    wide = wide.clamp(-limit, limit)
    is_fnuz = point.kv_dtype == E4M3FNUZ
    codes = wide.round() if point.kv_dtype == torch.int8 else round_to_fp8(wide, is_fnuz=is_fnuz)
    if point.is_power_of_two:
        return exact(name, outputs[name], codes)
    apart = codes_apart(outputs[name], codes)
    return Finding(lane="exact", output=name, compared=apart.numel(), share=float(apart.max()))
