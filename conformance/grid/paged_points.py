"""The points of paged attention: pairwise over all axes, then every edge that a real kernel got wrong.

pairwise     batch × dtypes × head × GQA × block × context × window × softcap × sinks × ALiBi × layout
edges        small, one fault each, named in `catches`
8-bit        both flavours of floats, and integers; unequal scales per tensor and per head
big          32k and 128k tokens, ids beyond 2^16, offsets beyond 2^31: profile "full" alone
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from octavo.conformance.grid.attending import Setting
from octavo.conformance.grid.batch import SPARE_BLOCKS, Request, scene
from octavo.conformance.grid.pairwise import pairwise

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3FN, E4M3FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz

DTYPES = ((F32, F32), (F32, BF16), (F32, F16), (BF16, BF16), (F16, F16))
HEADS = ((32, 32), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
GROUPS = ((2, 2), (4, 2), (6, 2), (4, 1), (5, 1), (7, 1), (8, 1), (16, 1), (32, 1))
"""Query heads and KV heads: ratios 1, 2, 3, 4, 5, 7, 8, 16, 32."""

BLOCKS = (1, 16, 32, 64, 128, 256)
CONTEXTS = {
    "short": (1, 15, 16, 17),
    "block": (-1, 0, 1),
    "512": (511, 512, 513),
    "2048": (2047, 2048, 2049),
    "4096": (4090, 4096),
}
"""KV lengths of each class, taken in turn; those of "block" are relative to the block size."""

WINDOWS = (None, "one", "under", "block", "over", "beyond")
MOST_WORK = 100_000_000
BEYOND = 100_000
BIG = 20_000
PLAIN = Setting()


@dataclass(frozen=True)
class Point:
    """A point of the grid.

    Attributes:
        scene: the batch's name. requests: the batch.
        q_layout: "dense", "fused" (q in a row of q, k and v) or "gapped" (apart, out too).
        has_gaps: between the blocks of the pool.
        extra_columns: of padding in the block table.
        candidates: block ids, for pools too big to fill. lost_bits: widths that an id might be cut to.
        catches: faults that the point is there for.
    """

    lane: str
    scene: str
    requests: tuple[Request, ...]
    setting: Setting = PLAIN
    block_size: int = 16
    q_layout: str = "dense"
    has_gaps: bool = False
    has_lse: bool = False
    extra_columns: int = 1
    candidates: tuple[int, ...] = ()
    lost_bits: tuple[int, ...] = ()
    catches: tuple[str, ...] = ()
    is_smoke: bool = False

    @property
    def name(self) -> str:
        context = max(r.num_keys for r in self.requests)
        parts = [f"{self.scene}.{context}", self.setting.name, f"b{self.block_size}"]
        parts += [] if self.q_layout == "dense" else [self.q_layout]
        parts += ["gaps"] if self.has_gaps else []
        parts += ["lse"] if self.has_lse else []
        parts += [f"wide{self.extra_columns}"] if self.extra_columns != 1 else []
        return f"paged_attention.{self.lane}/{'-'.join(parts)}"

    @property
    def work(self) -> int:
        """Multiplications of the first product."""
        return sum(r.num_rows * r.num_keys for r in self.requests) * self.setting.heads * self.setting.head_dim

    @property
    def is_big(self) -> bool:
        return bool(self.candidates) or max(r.num_keys for r in self.requests) > BIG


def points() -> Iterator[Point]:
    yield from _edges()
    yield from _needles()
    yield from _visible()
    yield from _eight_bit()
    yield from _big()
    yield from _pairs()


def _pairs() -> Iterator[Point]:
    axes = {
        "scene": ("decode", "prefill", "chunked", "mixed", "draft2", "draft4", "draft8"),
        "dtypes": DTYPES,
        "head": HEADS,
        "group": GROUPS,
        "block": BLOCKS,
        "context": tuple(CONTEXTS),
        "window": WINDOWS,
        "softcap": (None, 30.0, 50.0),
        "sinks": (False, True),
        "alibi": (False, True),
        "q_layout": ("dense", "fused", "gapped"),
        "has_gaps": (False, True),
        "extra_columns": (0, 1, 3),
    }
    turns = {name: itertools.cycle(values) for name, values in CONTEXTS.items()}
    for pick in pairwise(axes, _is_affordable):
        context = max(1, next(turns[pick["context"]]) + (pick["block"] if pick["context"] == "block" else 0))
        yield Point(
            "statistical",
            pick["scene"],
            scene(pick["scene"], context),
            _setting(pick),
            pick["block"],
            pick["q_layout"],
            pick["has_gaps"],
            has_lse=True,
            extra_columns=pick["extra_columns"],
        )


def _is_affordable(pick: dict[str, Any]) -> bool:
    longest = CONTEXTS[pick["context"]][-1] + (pick["block"] if pick["context"] == "block" else 0)
    if pick["scene"] == "prefill" and longest > 300:
        return False
    return Point("statistical", "", scene(pick["scene"], max(1, longest)), _setting(pick)).work <= MOST_WORK


def _setting(pick: dict[str, Any]) -> Setting:
    """A window relative to the block size as one of tokens."""
    block = pick["block"]
    window = {"one": 1, "under": max(1, block - 1), "block": block, "over": block + 1, "beyond": BEYOND}
    (heads, kv_heads), (head_dim, v_head_dim), (dtype, kv_dtype) = pick["group"], pick["head"], pick["dtypes"]
    return Setting(
        heads,
        kv_heads,
        head_dim,
        v_head_dim,
        dtype,
        kv_dtype,
        window=window.get(pick["window"]),
        softcap=pick["softcap"],
        sinks=pick["sinks"],
        alibi=pick["alibi"],
        kv_scale=pick.get("kv_scale", "none"),
    )


def _edge(name: str, requests: tuple[tuple[int, int], ...] | tuple[Request, ...], *catches: str, **point: Any) -> Point:
    ragged = tuple(r if isinstance(r, Request) else Request(*r) for r in requests)
    fields: dict[str, Any] = {"lane": "statistical", "has_lse": True} | point
    return Point(scene=name, requests=ragged, catches=catches, **fields)


def _edges() -> Iterator[Point]:
    """Statistical edges. Small and in fp32 or bf16: each is a fault that real devices shipped."""
    plain = ("last-token-dropped", "stale-slot", "output-scaled", "nan-v-beyond-seq-len", "nan-null-block",
             "mask-added")  # fmt: skip
    for dtype in (F32, BF16, F16):
        setting = Setting(dtype=dtype, kv_dtype=dtype)
        yield _edge(
            "plain", ((1, 37), (1, 5)), *plain, "atomics-nondeterministic", "lse-base-2", setting=setting, is_smoke=True
        )
        yield _edge("chunk", ((5, 37), (3, 20)), "causal-top-left", *plain, setting=setting, is_smoke=True)
    yield _edge("two", ((1, 100), (1, 70)), "skipped-block", "block-32-after-17-tokens", block_size=32)
    yield _edge("two", ((1, 18), (1, 31)), "block-32-after-17-tokens", block_size=32, is_smoke=True)
    yield _edge("small", ((1, 40),), "small-head-uninitialised", setting=Setting(2, 1, 32, 32), is_smoke=True)
    for context in (4097, 4224, 5000):
        setting = Setting(2, 1)
        yield _edge("one", ((1, context),), "only-first-4096-keys", setting=setting, block_size=256)
    for extra in (0, 1, 2, 3):
        yield _edge("tables", ((1, 70), (2, 33)), "table-width-not-multiple", extra_columns=extra)
    yield _edge("windowed", ((1, 100), (4, 70)), "window-first-block-zero", "window-off-by-one",
                "last-token-dropped", setting=Setting(window=17), is_smoke=True)  # fmt: skip
    yield _edge("unwindowed", ((1, 20), (3, 40)), "window-minus-one-literal")
    yield _edge("one-token-window", ((1, 20), (3, 40)), "window-off-by-one", setting=Setting(window=1))
    yield _edge("strided", ((1, 40), (4, 20)), "strided-kv-as-contiguous", has_gaps=True, is_smoke=True)
    yield _edge("interleaved", ((1, 40), (4, 20)), "interleaved-kv-as-contiguous")
    yield _edge("zero-length", ((1, 20), (0, 0), (2, 18)), "zero-length-sequence")
    yield _edge("no-keys", ((1, 20), (1, 0), (2, 18), (0, 9)), "zero-length-sequence", is_smoke=True)
    yield _edge("only-no-keys", ((1, 0), (2, 0)), "zero-length-sequence")
    yield _edge("no-rows", ((0, 0), (0, 7)), "zero-length-sequence")
    yield _edge("more-rows-than-keys", ((5, 3), (2, 2)), "causal-top-left")
    for cap in (30.0, 50.0):
        yield _edge("capped", ((1, 60), (3, 40)), "softcap-dropped", setting=Setting(softcap=cap), is_smoke=cap == 30)
    yield _edge("sinks-decode", ((1, 60), (1, 7)), "sink-dropped", setting=Setting(sinks=True))
    yield _edge("sinks", ((4, 60), (3, 7)), "sink-dropped", "sink-wrong-head", "lse-without-sink",
                setting=Setting(sinks=True), is_smoke=True)  # fmt: skip
    yield _edge("alibi", ((1, 60), (4, 33)), "alibi-ignored", setting=Setting(alibi=True), is_smoke=True)
    for heads, kv_heads in GROUPS:
        setting = Setting(heads, kv_heads, 32, 32)
        catches = ("gqa-not-power-of-two",) if heads // kv_heads & heads // kv_heads - 1 else ()
        yield _edge("groups", ((1, 40), (3, 18)), *catches, setting=setting)
    yield _edge("hot", ((1, 60), (4, 33)), "fp16-p-overflow", setting=Setting(dtype=F16, kv_dtype=F16, heat=6.0))
    yield _edge("uncausal", ((3, 33), (1, 16)), setting=Setting(causal=False))
    yield _edge("uncausal", ((3, 33), (1, 16)), setting=Setting(causal=False, window=9))
    yield _edge("tiles", ((300, 300),), setting=Setting(2, 1))
    yield _edge("tiles", ((300, 513), (1, 2)), setting=Setting(2, 1, window=100))
    shared = (Request(3, 100), Request(1, 90, shared_blocks=5), Request(2, 64, shared_blocks=3))
    yield _edge("shared", shared, block_size=16, is_smoke=True)
    yield _edge("shared", shared, block_size=16, setting=Setting(4, 1, 128, 128, BF16, BF16))
    for context in (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 2047, 2048, 2049, 4090, 4096):
        yield _edge("one", ((1, context),), setting=Setting(2, 1))
    for rows in (1, 2, 4, 8):
        yield _edge(f"draft{rows}-edge", ((rows, 50), (rows, rows), (rows, 17)), "stale-slot")
    yield _edge("latent-sized", ((1, 40), (8, 30)), setting=Setting(8, 1, 576, 512))


def _needles() -> Iterator[Point]:
    """The probe lane's needle: where a key that is wrongly read, hidden or shown changes the result altogether."""
    rows = ((1, 70), (4, 40), (8, 50), (1, 1), (1, 16), (1, 17))
    for dtype, kv_dtype in DTYPES:
        for head in HEADS:
            setting = Setting(4, 2, *head, dtype, kv_dtype)
            yield _edge("edges", rows, setting=setting, lane="needle", has_lse=False, is_smoke=head[0] == 64)
    for block in BLOCKS:
        for window in dict.fromkeys((None, 1, max(1, block - 1), block, block + 1, BEYOND)):
            catches = ("window-off-by-one",) if block == 16 and window in {15, 16, 17} else ()
            yield _edge("windows", ((1, 3 * block + 2), (4, 2 * block + 7), (3, 3)), *catches,
                        setting=Setting(4, 1, window=window), lane="needle", has_lse=False,
                        block_size=block)  # fmt: skip
        for context in (511, 513, 2047, 2049, 4096):
            dropped = ("last-token-dropped", "skipped-block") if (block, context) == (64, 513) else ()
            yield _edge("long", ((2, context), (1, context - 1)), *dropped,
                        setting=Setting(2, 1), lane="needle", has_lse=False, block_size=block)  # fmt: skip
    yield _edge("long", ((8, 5000),), "only-first-4096-keys",
                setting=Setting(4, 1), lane="needle", has_lse=False, block_size=256)  # fmt: skip
    for heads, kv_heads in GROUPS:
        yield _edge("groups", ((1, 40), (4, 18)), setting=Setting(heads, kv_heads), lane="needle", has_lse=False)


def _visible() -> Iterator[Point]:
    """Which keys count, softcap or not."""
    rows = ((1, 70), (5, 40), (3, 3), (1, 0))
    for dtype, kv_dtype in DTYPES:
        for window in (None, 1, 15, 16, 17, BEYOND):
            setting = Setting(8, 2, dtype=dtype, kv_dtype=kv_dtype, window=window, softcap=30.0)
            catches = ("window-off-by-one", "last-token-dropped") if dtype == kv_dtype == F32 else ()
            yield _edge("rows", rows, *catches, setting=setting, lane="visible", has_lse=False,
                        is_smoke=window == 17)  # fmt: skip
    for causal, context in itertools.product((False, True), (513, 2049, 4096)):
        setting = Setting(8, 1, causal=causal)
        yield _edge("long", ((3, context),), setting=setting, lane="visible", has_lse=False, block_size=64)


def _eight_bit() -> Iterator[Point]:
    scales = ("kv-scales-ignored", "kv-scales-swapped")
    for kv_dtype in (E4M3FN, E4M3FNUZ, torch.int8):
        flavour = ("fnuz-read-as-fn",) if kv_dtype == E4M3FNUZ else ()
        for kv_scale in ("tensor", "head"):
            small = Setting(kv_dtype=kv_dtype, kv_scale=kv_scale)
            yield _edge("plain", ((1, 37), (3, 20)), *scales, *flavour, setting=small)
            yield _edge("edges", ((1, 70), (4, 40)), *scales, *flavour, setting=small, lane="needle", has_lse=False)
        axes = {
            "dtypes": ((F32, kv_dtype), (BF16, kv_dtype), (F16, kv_dtype)),
            "head": ((64, 64), (128, 128), (192, 128), (256, 256)),
            "group": ((2, 2), (4, 2), (5, 1), (16, 1)),
            "block": (16, 32, 64, 256),
            "window": (None, "under", "over"),
            "softcap": (None, 30.0),
            "sinks": (False, True),
            "alibi": (False, True),
            "kv_scale": ("tensor", "head"),
            "scene": ("decode", "chunked", "mixed", "draft4"),
            "context": (17, 130, 513),
        }
        for pick in pairwise(axes):
            requests = scene(pick["scene"], pick["context"])
            yield Point("statistical", pick["scene"], requests, _setting(pick), pick["block"])


def _big() -> Iterator[Point]:
    """Profile "full" alone: long contexts, and pools of which only a few blocks are ever touched."""
    for context in (32_768, 131_072):
        for lane in ("statistical", "needle"):
            yield _edge("one", ((1, context),), lane=lane, setting=Setting(2, 1), block_size=64, has_lse=False)
        yield _edge("two", ((2, context),), lane="visible", setting=Setting(4, 1), block_size=64, has_lse=False)
    far = tuple(range(65_536 + 1, 65_536 + 9)) + tuple(range(70_000, 70_000 + SPARE_BLOCKS))
    yield _edge("ids-beyond-2e16", ((1, 70), (2, 40)), "block-id-16-bit", lane="needle", has_lse=False,
                setting=Setting(2, 1, 32, 32, F32, F16), candidates=far, lost_bits=(16, 15))  # fmt: skip
    # Blocks of 16 · 16 · (64 + 64) fp16: 2^15 elements and 2^16 bytes, so byte 2^31 lies in block 2^15 and element
    # 2^31 in block 2^16.
    edges = (2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1, 2**16, 2**16 + 1, 2**16 + 5)
    yield _edge("offsets-beyond-2e31", ((1, 60), (2, 40)), "block-id-16-bit", "slot-index-32-bit", lane="needle",
                has_lse=False, setting=Setting(16, 16, 64, 64, F32, F16),
                candidates=(*edges, *range(2**16 + 6, 2**16 + 6 + SPARE_BLOCKS)), lost_bits=(16, 15))  # fmt: skip
