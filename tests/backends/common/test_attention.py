"""Attention of both GPU backends against the reference in float64, with poison in all that must not be read."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from octavo.backends.common import graphs
from octavo.backends.common.attention import FEW_QUERIES, MANY_QUERIES, PagedAttentionOps, usual_queries
from octavo.backends.common.attention_call import chunks
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.launch import Recorder
from octavo.core.backend import AttentionMetadata, AttentionSpec, KVCache, KVCacheSpec, KVLayout, RowSpec
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference import attention as reference
from octavo.core.base.errors import UnsupportedOp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FP8 = {"e4m3fn": (torch.float8_e4m3fn, 0x7F), "e4m3fnuz": (torch.float8_e4m3fnuz, 0x80)}
TOLERANCE = {F32: 2e-5, BF16: 2e-2, F16: 3e-3}
PAD_ROWS, PAD_REQUESTS = 3, 2


def ops_of(gpu: Gpu) -> PagedAttentionOps:
    vendor = "cuda" if gpu.chip.arch.startswith("sm_") else "rocm"
    ops: PagedAttentionOps = importlib.import_module(f"octavo.backends.{vendor}.attention").AttentionOps(gpu)
    return ops


@dataclass(frozen=True)
class Batch:
    """Queries over a paged cache. Slots that no row may see, and blocks that no request owns, hold NaN."""

    q_THD: torch.Tensor
    kv: KVCache
    meta: AttentionMetadata


def batch_of(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head: tuple[int, int] = (32, 32),
    dtype: torch.dtype = F32,
    kv_dtype: torch.dtype = F32,
    block_size: int = 16,
    window: int | None = None,
    layout: KVLayout = KVLayout.NHD,
    seed: int = 0,
) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    rows, lengths = [q for q, _ in requests], [n for _, n in requests]
    width = max(1, *(-(-n // block_size) for n in lengths)) + 1
    num_blocks = len(requests) * width + 2
    table = torch.zeros(len(requests) + PAD_REQUESTS, width, dtype=torch.int32)
    table[: len(requests)] = torch.randperm(num_blocks - 2, generator=draw)[: len(requests) * width].view(-1, width) + 1
    is_seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for b, (queries, length) in enumerate(requests):
        for i in range(0 if window is None else max(0, length - queries - window + 1), length):
            is_seen[table[b, i // block_size], i % block_size] = True

    def cache(width: int) -> torch.Tensor:
        # A few elements between rows, so that no stride is a product of sizes.
        shape = (num_blocks, block_size, kv_heads, width + 8)
        if layout is KVLayout.HND:
            shape = (num_blocks, kv_heads, block_size, width + 8)
        x = torch.randn(shape, generator=draw).mul(4 if kv_dtype.itemsize == 1 else 1).to(kv_dtype)
        view = (x.transpose(1, 2) if layout is KVLayout.HND else x)[..., :width]
        codes = dict(FP8.values())
        if kv_dtype in codes:
            view.view(torch.uint8)[~is_seen] = codes[kv_dtype]
        else:
            view[~is_seen] = torch.nan
        return view

    total = sum(rows)
    starts = [sum(rows[:b]) for b in range(len(rows))] + [total] * (PAD_REQUESTS + 1)
    meta = AttentionMetadata(
        num_requests=len(rows),
        num_tokens=total,
        max_query_len=max(rows),
        max_seq_len=max(lengths),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(lengths + [0] * PAD_REQUESTS, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((total + PAD_ROWS,), -1),
        block_size=block_size,
    )
    spec = KVCacheSpec(kv_heads, *head, kv_dtype, block_size, window)
    q_THD = torch.randn(total + PAD_ROWS, heads + 1, head[0], generator=draw).to(dtype)[:, :heads]
    return Batch(q_THD, KVCache(spec, layout, num_blocks, cache(head[0]), cache(head[1])), meta)


def attend(gpu: Gpu, batch: Batch, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the batch's real rows. Rows of padding are left alone."""
    ops, (rows, heads, _) = ops_of(gpu), batch.q_THD.shape
    out = torch.full((rows, heads, batch.kv.spec.v_head_dim), -7.0, dtype=batch.q_THD.dtype)
    lse = torch.full((rows, heads), -7.0)
    scale = 1 / math.sqrt(batch.kv.spec.head_dim)
    ops.paged_attention(batch.q_THD, batch.kv, ops.plan(batch.meta), out=out, lse=lse, softmax_scale=scale, **arguments)
    total = batch.meta.num_tokens
    assert bool((out[total:] == -7).all() and (lse[total:] == -7).all())
    return out[:total], lse[:total]


def expected(batch: Batch, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference in float64."""
    assert batch.kv.key_NSKD is not None
    assert batch.kv.value_NSKD is not None
    wide = replace(
        batch.kv, key_NSKD=batch.kv.key_NSKD.to(F32).double(), value_NSKD=batch.kv.value_NSKD.to(F32).double()
    )
    rows, heads, _ = batch.q_THD.shape
    out, lse = torch.zeros(rows, heads, batch.kv.spec.v_head_dim).double(), torch.zeros(rows, heads).double()
    arguments = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    reference.paged_attention(
        batch.q_THD.double(), wide, StepPlan(batch.meta), out=out, lse=lse,
        softmax_scale=1 / math.sqrt(batch.kv.spec.head_dim), **arguments,
    )  # fmt: skip
    total = batch.meta.num_tokens
    return out[:total], lse[:total]


def check(gpu: Gpu, batch: Batch, **arguments: Any) -> None:
    (out, lse), (want, want_lse) = attend(gpu, batch, **arguments), expected(batch, **arguments)
    size = max(1.0, float(want.abs().max()))
    assert float((out.double() - want).abs().max()) < TOLERANCE[batch.q_THD.dtype] * size
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


RAGGED = ((1, 37), (0, 9), (5, 20), (3, 0), (4, 2), (1, 1))
"""Decode, no rows, a chunk, no keys, more rows than keys, one key."""


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_ragged_batches(gpu: Gpu, dtype: torch.dtype) -> None:
    check(gpu, batch_of(RAGGED, dtype=dtype, kv_dtype=dtype))


@pytest.mark.parametrize(("window", "causal"), [(1, True), (15, True), (16, False), (17, True)])
def test_windows(gpu: Gpu, window: int, causal: bool) -> None:
    check(gpu, batch_of(((1, 50), (20, 45)), window=window, kv_dtype=BF16, dtype=BF16), window=window, causal=causal)


def test_all_that_happens_to_a_score(gpu: Gpu) -> None:
    check(
        gpu,
        batch_of(RAGGED, heads=6),
        softcap=3.0,
        sinks_H=torch.linspace(-3, 3, 6),
        alibi_slopes_H=torch.exp2(-torch.arange(1.0, 7.0)),
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head", "block_size"),
    [
        (3, 3, (80, 80), 1),
        (20, 1, (64, 64), 32),
        (7, 1, (192, 128), 24),
        (4, 1, (20, 12), 128),
        (16, 2, (576, 512), 64),
    ],
)
def test_heads_and_blocks(gpu: Gpu, heads: int, kv_heads: int, head: tuple[int, int], block_size: int) -> None:
    check(gpu, batch_of(((3, 40), (1, 5)), heads=heads, kv_heads=kv_heads, head=head, block_size=block_size))


@pytest.mark.parametrize("num_scales", [1, 2])
def test_8_bit_keys_and_values(gpu: Gpu, num_scales: int) -> None:
    kv_dtype, _ = FP8[gpu.chip.fp8]
    batch = batch_of(RAGGED, dtype=BF16, kv_dtype=kv_dtype, layout=KVLayout.HND)
    scales = torch.tensor([0.1, 0.2])[:num_scales]
    check(gpu, batch, k_scale=scales, v_scale=scales.flip(0) * 3)


def test_keys_of_another_type_than_the_queries_meet_in_fp32(gpu: Gpu) -> None:
    check(gpu, batch_of(((2, 40),), dtype=BF16, kv_dtype=F16))
    check(gpu, batch_of(((2, 40),), dtype=F32, kv_dtype=BF16))


def test_long_requests_are_split_and_merged(gpu: Gpu) -> None:
    """Two splits and more, a window that begins inside of one, and rows that see nothing of a split."""
    requests = ((1, 600), (5, 260), (2, 6))
    check(gpu, batch_of(requests, dtype=BF16, kv_dtype=BF16), sinks_H=torch.arange(4.0))
    check(gpu, batch_of(requests, window=300, dtype=F16, kv_dtype=F16), window=300)


def test_a_full_chip_is_not_split(gpu: Gpu) -> None:
    small = replace(gpu, chip=replace(gpu.chip, num_units=1))
    check(small, batch_of(((1, 400), (40, 150)), dtype=BF16, kv_dtype=BF16))
    check(small, batch_of(((1, 400), (40, 150)), window=40, dtype=BF16, kv_dtype=BF16), window=40)


@pytest.mark.parametrize("dtype", [BF16])
def test_deterministic_bits_depend_on_a_row_s_own_keys_alone(gpu: Gpu, dtype: torch.dtype) -> None:
    """Alone, in company, in chunks, and in a workspace that holds only some of the splits."""
    fixed = replace(gpu, deterministic=True)
    whole = batch_of(((12, 600), (1, 30), (3, 3)), dtype=dtype, kv_dtype=dtype)
    out, lse = attend(fixed, whole)
    torch.testing.assert_close(out.double(), expected(whole)[0], rtol=0, atol=10 * TOLERANCE[dtype])
    tight = replace(fixed, chip=replace(gpu.chip, num_units=1))
    assert torch.equal(attend(tight, whole)[0], out)
    for first, stop in ((0, 1), (1, 12)):
        part = replace(
            whole,
            q_THD=whole.q_THD[first:stop],
            meta=replace(
                whole.meta,
                num_requests=1,
                num_tokens=stop - first,
                query_start_loc=torch.tensor([0, stop - first], dtype=torch.int32),
                seq_lens=torch.tensor([588 + stop], dtype=torch.int32),
            ),
        )
        alone, lse_alone = attend(fixed, part)
        assert torch.equal(alone, out[first:stop])
        assert torch.equal(lse_alone, lse[first:stop])


@pytest.mark.parametrize("causal", [True, False])
def test_contiguous_keys(gpu: Gpu, causal: bool) -> None:
    """K and V in one row, rows of NaN behind them."""
    rows, lengths = (5, 20, 0, 2), (37, 20, 4, 0)
    kv = torch.randn(sum(lengths) + 2, 2, 64 + 32)
    kv[sum(lengths) :] = torch.nan
    k, v = kv[..., :64], kv[..., 64:]
    q = torch.randn(sum(rows), 4, 64)
    starts = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32) for x in (rows, lengths)]
    out, lse = torch.empty(len(q), 4, 32), torch.empty(len(q), 4)
    want, want_lse = torch.zeros(len(q), 4, 32), torch.zeros(len(q), 4)
    rule: dict[str, Any] = {"causal": causal, "softmax_scale": 0.125, "window": 9, "softcap": 5.0}
    ops_of(gpu).attention(q, k, v, *starts, out=out, lse=lse, **rule)
    reference.attention(q, k, v, *starts, out=want, lse=want_lse, **rule)
    torch.testing.assert_close(out, want, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_parts_are_merged_in_place_and_empty_ones_dropped(gpu: Gpu, dtype: torch.dtype) -> None:
    parts, lses = torch.randn(2, 9, 3, 80).to(dtype), torch.randn(2, 9, 3) * 3
    lses[0, ::3], lses[1, ::2] = -torch.inf, -torch.inf
    parts[lses == -torch.inf] = torch.nan
    want, want_lse = torch.empty(9, 3, 80).double(), torch.empty(9, 3).double()
    reference.merge_attention(
        parts[0].double(), lses[0].double(), parts[1].double(), lses[1].double(), out=want, lse=want_lse
    )
    ops_of(gpu).merge_attention(parts[0], lses[0], parts[1], lses[1], out=parts[1], lse=lses[0])
    torch.testing.assert_close(parts[1].double(), want, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(lses[0].double(), want_lse, rtol=1e-6, atol=1e-6)


def meta_of(queries: Sequence[int], num_tokens: int, num_requests: int) -> AttentionMetadata:
    """A step of requests of so many queries, padded; without numbers."""
    table = torch.empty(num_requests, 8192, dtype=torch.int32, device="meta")
    starts = torch.empty(num_requests + 1, dtype=torch.int32, device="meta")
    slots = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    return AttentionMetadata(
        len(queries), sum(queries), max(queries, default=0), 8192, starts, table[:, 0].contiguous(), table, slots, 16
    )


@pytest.mark.parametrize(
    ("queries", "usual"),
    [
        ([1] * 5, 1),
        ([2] * 7, 2),
        ([2, 1, 1], 2),
        ([4] * 3, 4),
        ([5] * 3, MANY_QUERIES),
        ([4000], MANY_QUERIES),
        ([300, *[1] * 255], MANY_QUERIES),  # a chunk with half of all tokens
        ([30, *[1] * 255], 2),  # a chunk beside many that decode
        ([], 1),
    ],
)
def test_usual_queries_are_those_of_real_requests(queries: list[int], usual: int) -> None:
    assert usual_queries(meta_of(queries, 4096, 256)) == usual


def test_a_shape_has_no_more_plans_than_recordings_are_kept() -> None:
    assert len({*FEW_QUERIES, MANY_QUERIES}) <= graphs.MOST_RECORDINGS


@pytest.mark.parametrize(
    ("queries", "num_tokens", "num_requests"),
    [([4000], 4096, 256), ([100], 112, 112), ([1] * 5, 8, 2), ([1] * 65, 80, 64), ([1] * 64, 64, 64)],
)
def test_padding_does_not_choose_the_tiles(gpu: Gpu, queries: list[int], num_tokens: int, num_requests: int) -> None:
    """A prompt alone gets the tiles of prompts, though padded to many requests; decode keeps its own."""
    recorder = Recorder()
    ops = ops_of(replace(gpu, device=torch.device("meta"), launch=recorder))
    q = torch.empty(num_tokens, 32, 128, dtype=BF16, device="meta")
    kv = torch.empty(64, 16, 8, 128, dtype=BF16, device="meta")
    cache = KVCache(KVCacheSpec(8, 128, 128, BF16, 16), KVLayout.NHD, 64, kv, kv)
    plan = ops.plan(meta_of(queries, num_tokens, num_requests))
    ops.paged_attention(q, cache, plan, out=q, softmax_scale=1.0)
    first = recorder.records[0]
    table = {"attention_tile": "attention-tile", "attention_split": "attention-split"}[first.kernel.__name__]
    rows = 4 * max(queries)
    entry = gpu.tuning.pick(table, bits=16, kv_bits=16, width=128, mode="free", rows=rows)
    assert first.constants["BLOCK_M"] == entry.tile["BLOCK_M"]
    assert (entry.tile["BLOCK_M"] >= 64) == (max(queries) > 1)


def test_deterministic_plans_do_not_hang_on_the_batch(gpu: Gpu) -> None:
    ops = ops_of(replace(gpu, deterministic=True))
    plans = [ops.plan(meta_of(queries, 4096, 256)) for queries in ([4000], [1] * 5)]
    assert [plan.queries for plan in plans] == [1, 1]


def test_what_is_refused_raises_as_well(gpu: Gpu) -> None:
    ops = ops_of(gpu)
    spec = AttentionSpec(4, 2, 64, 64, BF16, BF16, 16, KVLayout.NHD)
    assert ops.supports("paged_attention", spec) is None
    other = next(dtype for flavour, (dtype, _) in FP8.items() if flavour != gpu.chip.fp8)
    for change in (
        {"layout": KVLayout.HDN}, {"num_heads": 5}, {"kv_dtype": other}, {"q_dtype": torch.float64}, {"head_dim": 1024},
    ):  # fmt: skip
        assert ops.supports("paged_attention", replace(spec, **change)) is not None  # type: ignore[arg-type]
    assert ops.supports("merge_attention", RowSpec(64, torch.float64)) is not None
    batch = batch_of(((1, 5),))
    with pytest.raises(UnsupportedOp):
        attend(gpu, replace(batch, q_THD=batch.q_THD.double()))


def test_splits_end_where_tiles_of_keys_end(gpu: Gpu) -> None:
    """Else a tile would belong to two splits, and its keys would count twice."""
    entries = gpu.tuning.by_kernel["attention-split"]
    assert [entry.tile for entry in entries if entry.tile["SPLIT"] % entry.tile["BLOCK_N"]] == []


def test_a_head_is_covered_by_powers_of_two() -> None:
    widths = {
        32: (32, 0),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        192: (128, 64),
        576: (512, 64),
        20: (16, 16),
        1: (16, 0),
    }
    assert {width: chunks(width) for width in widths} == widths | {20: (32, 0)}
