"""Moves of whole blocks: bytes must arrive as they left, whatever they mean.

    copy_blocks/…     pairs in order: 1 → 2, 2 → 3 leaves what 1 held in all three; a block onto itself
    gather_blocks/…   blocks, some twice, into canonical [n, S, K, D] buffers
    scatter_blocks/…  the way back

Every dtype of a cache, latent caches (no values), blocks apart, and ids beyond 2^16 at offsets beyond 2^31 bytes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, all_of, holds_bytes, stores_kv_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.grid.attending import ONE_BYTE, ONE_BYTE_PROFILES
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.trial import Block, HostPool, HostTensor, Outputs, Trial, given, wanted
from octavo.core.backend import CacheSpec, KVCacheSpec, KVLayout

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
SMALL = (2, 64, 64)
LATENT = (1, 72, 0)
OPS = ("copy_blocks", "gather_blocks", "scatter_blocks")
FAR = (2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1)
"""With blocks of 2^15 bytes, byte 2^31 is the first that an id of 17 bits reaches: it begins block 2^16."""

COPIES = {
    "pairs": ((1, 4), (2, 5)),
    "chain": ((1, 2), (2, 3), (3, 6)),
    "fan": ((1, 4), (1, 5), (1, 6)),
    "self": ((1, 1), (2, 3)),
    "none": (),
    "far": ((FAR[0], FAR[4]), (FAR[1], FAR[5]), (FAR[3], FAR[2])),
}
MOVES = {
    "some": (5, 1, 3),
    "all": (1, 2, 3, 4, 5, 6),
    "twice": (2, 5, 2),
    "none": (),
    "far": FAR,
}
"""Block ids of gather and scatter; scatter never takes "twice"."""

CATCHES = {"chain": ("copies-at-once",), "some": ("interleaved-kv-as-contiguous",)}
"""Faults by move."""


@dataclass(frozen=True)
class Point:
    """A move of one op. shape: KV heads, head size of K and of V."""

    op: str
    move: str
    dtype: torch.dtype = F32
    shape: tuple[int, int, int] = SMALL
    block_size: int = 16
    has_gaps: bool = False
    catches: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = [self.move, dtype_name(self.dtype), "k{}d{}v{}".format(*self.shape), f"b{self.block_size}"]
        return f"{self.op}/{'-'.join(parts + (['gaps'] if self.has_gaps else []))}"

    @property
    def spec(self) -> CacheSpec:
        layout = KVLayout.NHD if self.shape[2] else KVLayout.MLA
        return CacheSpec(*self.shape, self.dtype, self.dtype, self.block_size, layout)

    @property
    def profiles(self) -> frozenset[str]:
        if self.move == "far":
            return frozenset()
        special = ONE_BYTE_PROFILES.get(self.dtype, frozenset()) | ({"mla"} if not self.shape[2] else set())
        if special:
            return frozenset(special)
        names = {"core", "deterministic", "tiny-full"}
        return frozenset(names | ({"smoke", "tiny"} if self.dtype == F32 and self.shape == SMALL else set()))


def cases() -> Iterable[Case]:
    for point in dict.fromkeys(_points()):
        yield Case(
            name=point.name,
            op=point.op,
            spec=point.spec,
            axes={
                "kv": dtype_name(point.dtype),
                "head": "{1}/{2}".format(*point.shape),
                "block": str(point.block_size),
                "batch": point.move,
                "stride": "strided" if point.has_gaps else "dense",
            },
            lanes=("exact",),
            build=functools.partial(BUILDERS[point.op], point),
            profiles=point.profiles,
            faults=frozenset(point.catches),
            requires=all_of(stores_kv_in(point.dtype), holds_bytes(2**31 if point.move == "far" else 0)),
            is_large=point.move == "far",
        )


def _points() -> Iterator[Point]:
    for op in OPS:
        moves = [m for m in (COPIES if op == OPS[0] else MOVES) if (op, m) != ("scatter_blocks", "twice")]
        for move in moves:
            if move == "far":
                yield Point(op, move, F16, (8, 64, 64), catches=("block-id-16-bit",))
                continue
            yield Point(op, move, catches=CATCHES.get(move, ()))
        move = "chain" if op == OPS[0] else "some"
        for dtype, has_gaps in itertools.product((F32, BF16, F16, *ONE_BYTE), (False, True)):
            if (dtype, has_gaps) != (F32, False):
                strided = ("strided-kv-as-contiguous",) if dtype == F32 else ()
                yield Point(op, move, dtype, has_gaps=has_gaps, catches=strided)
        for shape, block_size in itertools.product(((1, 32, 32), (3, 80, 80), (2, 192, 128), (5, 1, 3)), (1, 64, 256)):
            yield Point(op, move, BF16, shape, block_size)
        for dtype in (F32, BF16, *ONE_BYTE):
            yield Point(op, move, dtype, LATENT)


def build_copy(point: Point, draw: Draw) -> Trial:
    pairs = COPIES[point.move]
    blocks = _contents(point, draw, sorted({block for pair in pairs for block in pair}))
    held = dict(blocks)
    for source, destination in pairs:
        held[destination] = held[source]
    pool = _pool(point, blocks, [destination for _, destination in pairs])

    def run(bench: Bench) -> None:
        bench.op("copy_blocks", point.spec)(bench.kv("kv"), bench["pairs"])

    tensors = (given("pairs", torch.tensor(pairs, dtype=torch.int64).view(-1, 2)),)
    check = functools.partial(_check_pool, point, held, sorted({destination for _, destination in pairs}))
    return Trial(tensors, run, check, pools=(pool,), is_empty=not pairs)


def build_gather(point: Point, draw: Draw) -> Trial:
    ids = MOVES[point.move]
    blocks = _contents(point, draw, sorted(set(ids)))
    tensors: list[HostTensor] = [given("ids", torch.tensor(ids, dtype=torch.int64))]
    for name, width in (("out_k", point.shape[1]), ("out_v", point.shape[2])):
        tensors.append(wanted(name, (len(ids), point.block_size, point.shape[0], width), point.dtype))

    def run(bench: Bench) -> None:
        bench.op("gather_blocks", point.spec)(bench.kv("kv"), bench["ids"], out_k=bench["out_k"], out_v=bench["out_v"])

    def check(outputs: Outputs) -> list[Finding]:
        return [
            exact(name, outputs[name], torch.stack([blocks[i][part] for i in ids]))
            for part, name in enumerate(("out_k", "out_v"))
            if ids and point.shape[1 + part]
        ]

    return Trial(tuple(tensors), run, check, pools=(_pool(point, blocks, []),), is_empty=not ids)


def build_scatter(point: Point, draw: Draw) -> Trial:
    ids = MOVES[point.move]
    held = _contents(point, draw, list(ids))
    parts = [torch.stack([held[i][part] for i in ids]) if ids else _no_blocks(point, part) for part in (0, 1)]
    pool = _pool(point, dict.fromkeys(ids), list(ids))

    def run(bench: Bench) -> None:
        bench.op("scatter_blocks", point.spec)(bench.kv("kv"), bench["ids"], bench["k"], bench["v"])

    tensors = (given("ids", torch.tensor(ids, dtype=torch.int64)), given("k", parts[0]), given("v", parts[1]))
    check = functools.partial(_check_pool, point, held, sorted(ids))
    return Trial(tensors, run, check, pools=(pool,), is_empty=not ids)


BUILDERS = dict(zip(OPS, (build_copy, build_gather, build_scatter), strict=True))
"""Never written to."""


def _contents(point: Point, draw: Draw, ids: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Full blocks. Below 96: an 8-bit output must not happen to hold what marks the unwritten."""
    heads, head_dim, v_head_dim = point.shape

    def drawn(width: int) -> torch.Tensor:
        return draw.normal(point.block_size, heads, width, std=8.0).clamp(-96, 96).to(point.dtype)

    return {block: (drawn(head_dim), drawn(v_head_dim)) for block in ids}


def _no_blocks(point: Point, part: int) -> torch.Tensor:
    return torch.empty(0, point.block_size, point.shape[0], point.shape[1 + part], dtype=point.dtype)


def _pool(point: Point, blocks: Mapping[int, Block], written: list[int]) -> HostPool:
    S = point.block_size
    spec = KVCacheSpec(*point.shape, point.dtype, S)
    slots = frozenset(block * S + offset for block in written for offset in range(S))
    is_far = point.move == "far"
    named: dict[int, Block] = dict(blocks)
    for block in list(named) if is_far else []:
        named.setdefault(block & 0xFFFF, None)
    pad = 16 * (spec.block_bytes // 32) + 64 if point.has_gaps else 0
    return HostPool("kv", spec, FAR[-1] + 2 if is_far else 8, named, slots, pad_bytes=pad, is_lazy=is_far)


def _check_pool(
    point: Point, held: dict[int, tuple[torch.Tensor, torch.Tensor]], written: list[int], outputs: Outputs
) -> list[Finding]:
    """The written blocks, ascending, slot after slot."""
    return [
        exact(f"kv.{name}", outputs[f"kv.{name}"], torch.cat([held[block][part] for block in written]))
        for part, name in enumerate(("key", "value"))
        if written and point.shape[1 + part]
    ]
