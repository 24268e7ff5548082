"""Latent attention of both GPU backends against the reference in float64, with poison in all that must not be read."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from octavo.backends.common.attention import AttentionPlan, PagedAttentionOps
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.launch import Recorder
from octavo.backends.common.mla import LatentAttentionOps
from octavo.core.backend import AttentionMetadata, AttentionSpec, KVCache, KVCacheSpec, KVLayout
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference import mla as reference
from octavo.core.base.errors import UnsupportedOp

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
FP8 = {"e4m3fn": (torch.float8_e4m3fn, 0x7F), "e4m3fnuz": (torch.float8_e4m3fnuz, 0x80)}
TOLERANCE = {F32: 2e-5, BF16: 2e-2, F16: 3e-3}
SCALE = 0.2
PAD_ROWS, PAD_REQUESTS = 3, 2


@dataclass(frozen=True)
class Batch:
    """Queries over latents. Slots that no row may see, and blocks that no request owns, hold NaN."""

    q_latent_THC: torch.Tensor
    q_rope_THR: torch.Tensor
    kv: KVCache
    meta: AttentionMetadata

    @property
    def wide(self) -> Batch:
        """The same numbers in float64."""
        assert self.kv.key_NSKD is not None
        kv = replace(self.kv, key_NSKD=self.kv.key_NSKD.to(F32).double())
        return replace(self, q_latent_THC=self.q_latent_THC.double(), q_rope_THR=self.q_rope_THR.double(), kv=kv)

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor, KVCache]:
        return self.q_latent_THC, self.q_rope_THR, self.kv


def ops_of(gpu: Gpu) -> tuple[LatentAttentionOps, PagedAttentionOps]:
    """The op's group, and the group that plans."""
    vendor = f"octavo.backends.{'cuda' if gpu.chip.arch.startswith('sm_') else 'rocm'}"
    planner: PagedAttentionOps = importlib.import_module(f"{vendor}.attention").AttentionOps(gpu)
    ops: LatentAttentionOps = importlib.import_module(f"{vendor}.mla").MlaOps(gpu)
    return ops, planner


def batch_of(
    requests: Sequence[tuple[int, int]],
    *,
    heads: int = 8,
    width: tuple[int, int] = (32, 8),
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
    block_size: int = 16,
    seed: int = 0,
) -> Batch:
    """requests: queries and KV length of each. width: of the latent and of the rotary part."""
    draw = torch.Generator().manual_seed(seed)
    rows, lengths = [q for q, _ in requests], [n for _, n in requests]
    most_blocks = max(1, *(-(-n // block_size) for n in lengths)) + 1
    num_blocks = len(requests) * most_blocks + 2
    table = torch.zeros(len(requests) + PAD_REQUESTS, most_blocks, dtype=torch.int32)
    order = torch.randperm(num_blocks - 2, generator=draw)[: len(requests) * most_blocks]
    table[: len(requests)] = order.view(-1, most_blocks) + 1
    is_seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for i in range(length):
            is_seen[table[b, i // block_size], i % block_size] = True
    # A few elements between rows, so that no stride is a product of sizes.
    latents = torch.randn(num_blocks, block_size, 1, sum(width) + 8, generator=draw).to(kv_dtype)[..., : sum(width)]
    codes = dict(FP8.values())
    if kv_dtype in codes:
        latents.view(torch.uint8)[~is_seen] = codes[kv_dtype]
    else:
        latents[~is_seen] = torch.nan
    total = sum(rows)
    starts = [0, *itertools.accumulate(rows)] + [total] * PAD_REQUESTS
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
    spec = KVCacheSpec(1, sum(width), 0, kv_dtype, block_size)
    q_THD = torch.randn(total + PAD_ROWS, heads, sum(width) + 8, generator=draw).to(dtype)
    parts = q_THD[..., : width[0]], q_THD[..., width[0] : sum(width)]
    return Batch(*parts, KVCache(spec, KVLayout.MLA, num_blocks, latents, latents[..., :0]), meta)


def attend(gpu: Gpu, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the batch's real rows. Rows of padding are left alone."""
    ops, planner = ops_of(gpu)
    q_latent = batch.q_latent_THC
    out = torch.full((*q_latent.shape[:2], q_latent.shape[2] + 8), -7.0, dtype=q_latent.dtype)
    lse = torch.full((q_latent.shape[0], q_latent.shape[1] + 1), -7.0)
    ops.mla_attention(
        *batch.plain,
        planner.plan(batch.meta),
        out=out[..., : q_latent.shape[2]],
        lse=lse[:, :-1],
        softmax_scale=SCALE,
    )
    total = batch.meta.num_tokens
    assert bool((out[total:] == -7).all() and (lse[total:] == -7).all())
    assert bool((out[..., q_latent.shape[2] :] == -7).all() and (lse[:, -1] == -7).all())
    return out[:total, :, : q_latent.shape[2]], lse[:total, :-1]


def check(gpu: Gpu, batch: Batch) -> None:
    out, lse = attend(gpu, batch)
    wide, total = batch.wide, batch.meta.num_tokens
    want, want_lse = torch.zeros(wide.q_latent_THC.shape).double(), torch.zeros(wide.q_latent_THC.shape[:2]).double()
    reference.mla_attention(*wide.plain, StepPlan(batch.meta), out=want, lse=want_lse, softmax_scale=SCALE)
    limit = TOLERANCE[out.dtype]
    torch.testing.assert_close(out.double(), want[:total], rtol=limit, atol=limit)
    torch.testing.assert_close(lse.double(), want_lse[:total], rtol=1e-4, atol=1e-4)


def recorded(gpu: Gpu, batch: Batch) -> Recorder:
    """The launches of a call, none of which runs."""
    recorder = Recorder()
    attend(replace(gpu, launch=recorder), batch)
    return recorder


DECODE = ((1, 40), (1, 1), (1, 17))
RAGGED = ((3, 20), (0, 0), (1, 0), (4, 2), (1, 33))
"""A chunk, a request without tokens, one without keys, one with more queries than keys, a decode."""


@pytest.mark.parametrize("heads", [1, 8, 12, 16, 24])
def test_heads_and_rows_are_packed(gpu: Gpu, heads: int) -> None:
    """Tiles of one token and of several; rows that no head fills."""
    check(gpu, batch_of(RAGGED, heads=heads))


@pytest.mark.parametrize("drafts", [2, 4, 8])
def test_drafts(gpu: Gpu, drafts: int) -> None:
    check(gpu, batch_of(((drafts, 40), (drafts, drafts)), heads=12))


def test_more_heads_than_a_tile_has_rows(gpu: Gpu) -> None:
    check(gpu, batch_of(((1, 20), (2, 9)), heads=72))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(F32, F32), (F16, F16), (F32, BF16)])
def test_types(gpu: Gpu, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(gpu, batch_of(RAGGED, dtype=dtype, kv_dtype=kv_dtype))


@pytest.mark.parametrize("heads", [8, 32])
def test_8_bit_latents(gpu: Gpu, heads: int) -> None:
    check(gpu, batch_of(DECODE, heads=heads, kv_dtype=FP8[gpu.chip.fp8][0]))


@pytest.mark.parametrize(("block_size", "width"), [(1, (48, 24)), (64, (64, 16)), (64, (512, 64))])
def test_blocks_and_widths(gpu: Gpu, block_size: int, width: tuple[int, int]) -> None:
    """Blocks that hold whole tiles of keys and blocks that don't; widths that are padded, and a model's."""
    check(gpu, batch_of(((1, 70), (2, 40)), width=width, block_size=block_size))


def test_blocks_of_a_tile_and_less_give_the_same_bits(gpu: Gpu) -> None:
    small = batch_of(((1, 150),), block_size=16)
    assert small.kv.key_NSKD is not None
    lengths = [(1, 150)]
    large = batch_of(lengths, block_size=64)
    assert large.kv.key_NSKD is not None
    for i in range(150):
        source = small.kv.key_NSKD[small.meta.block_table[0, i // 16], i % 16]
        large.kv.key_NSKD[large.meta.block_table[0, i // 64], i % 64] = source
    large = replace(large, q_latent_THC=small.q_latent_THC, q_rope_THR=small.q_rope_THR)
    assert torch.equal(attend(gpu, small)[0], attend(gpu, large)[0])


def test_long_requests_are_split_and_merged(gpu: Gpu) -> None:
    batch = batch_of(((2, 300), (1, 0), (1, 70)), heads=12)
    kernels = [record.kernel.__name__ for record in recorded(gpu, batch).records]
    assert kernels == ["mla_attention", "merge_splits"]
    check(gpu, batch)


def test_a_full_chip_is_not_split(gpu: Gpu) -> None:
    """Without splits there is nothing to merge: the kernel writes out and lse."""
    small = replace(gpu, chip=replace(gpu.chip, num_units=1))
    batch = batch_of(((2, 300), (1, 0), (1, 70)), heads=12)
    assert [record.kernel.__name__ for record in recorded(small, batch).records] == ["mla_attention"]
    check(small, batch)


@pytest.mark.parametrize("heads", [12, 24])
def test_deterministic_bits_depend_on_a_row_s_own_keys_alone(gpu: Gpu, heads: int) -> None:
    """A token alone, with more tokens of its request, and beside other requests; with a wider table, too."""
    gpu = replace(gpu, deterministic=True)
    chunk = batch_of(((4, 530), (1, 5)), heads=heads)
    out, lse = attend(gpu, chunk)
    meta = replace(
        chunk.meta,
        num_requests=1,
        num_tokens=1,
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.tensor([529], dtype=torch.int32),
        block_table=torch.cat((chunk.meta.block_table[:1], torch.zeros(1, 40, dtype=torch.int32)), dim=1),
    )
    alone = replace(chunk, q_latent_THC=chunk.q_latent_THC[2:3], q_rope_THR=chunk.q_rope_THR[2:3], meta=meta)
    alone_out, alone_lse = attend(gpu, alone)
    assert torch.equal(alone_out[0], out[2])
    assert torch.equal(alone_lse[0], lse[2])
    check(gpu, chunk)


@pytest.mark.parametrize("heads", [16, 80])
def test_splits_that_pass_the_workspace_come_in_slabs(gpu: Gpu, heads: int) -> None:
    """With room for one tile at a time the answer is the same, from more launches; heads in one chunk or in several."""
    gpu = replace(gpu, deterministic=True)
    batch = batch_of(((3, 600), (1, 40)), heads=heads)
    ops, _ = ops_of(gpu)
    out = torch.zeros(batch.q_latent_THC.shape, dtype=BF16)
    want = attend(gpu, batch)[0]
    recorder = Recorder()
    block_m = gpu.tuning.pick("mla-attention", bits=16, kv_bits=16, mode="fixed", rows=heads).tile["BLOCK_M"]
    chunks = -(-heads // block_m)
    tight = AttentionPlan(batch.meta, torch.zeros(3 * chunks * block_m * (32 + 2)), 1)
    ops.mla_attention(*batch.plain, tight, out=out, softmax_scale=SCALE)
    assert torch.equal(out[: batch.meta.num_tokens], want)
    ops_of(replace(gpu, launch=recorder))[0].mla_attention(*batch.plain, tight, out=out, softmax_scale=SCALE)
    assert len(recorder.records) > 2


def test_splits_of_one_tile_that_pass_the_workspace_are_refused(gpu: Gpu) -> None:
    gpu = replace(gpu, deterministic=True)
    batch = batch_of(((1, 600),), heads=16)
    out = torch.zeros(batch.q_latent_THC.shape, dtype=BF16)
    with pytest.raises(UnsupportedOp, match="exceeds the workspace"):
        ops_of(gpu)[0].mla_attention(
            *batch.plain, AttentionPlan(batch.meta, torch.zeros(16 * (32 + 2)), 1), out=out, softmax_scale=SCALE
        )


def test_launches_depend_on_shapes_alone(gpu: Gpu) -> None:
    """So that a recorded step serves all lengths of its shape."""

    def launches(lengths: Sequence[int]) -> list[tuple[Any, ...]]:
        batch = batch_of([(1, 300), (1, 20)], heads=16)
        batch.meta.seq_lens[:2] = torch.tensor(lengths)
        return [(r.kernel.__name__, r.grid, r.constants) for r in recorded(gpu, batch).records]

    assert launches([300, 20]) == launches([1, 0])


def test_padding_does_not_choose_the_tiles(gpu: Gpu) -> None:
    """A chunk alone, padded to many requests, gets the tiles of chunks; so does a decode among padding get its own."""
    heads = 16

    def block_m(requests: Sequence[tuple[int, int]], padding: int) -> int:
        batch = batch_of(requests, heads=heads)
        starts = torch.nn.functional.pad(batch.meta.query_start_loc, (0, padding), value=batch.meta.num_tokens)
        table = torch.nn.functional.pad(batch.meta.block_table, (0, 0, 0, padding))
        meta = replace(batch.meta, query_start_loc=starts, block_table=table)
        recorder = Recorder()
        ops, planner = ops_of(replace(gpu, launch=recorder))
        ops.mla_attention(
            *batch.plain, planner.plan(meta), out=torch.empty_like(batch.q_latent_THC), softmax_scale=SCALE
        )
        return int(recorder.records[0].constants["BLOCK_M"])

    def expected(rows: int) -> int:
        return gpu.tuning.pick("mla-attention", bits=16, kv_bits=16, mode="free", rows=rows).tile["BLOCK_M"]

    assert expected(heads) < expected(heads * 40)
    assert block_m([(40, 40)], padding=60) == expected(heads * 40)
    assert block_m([(1, 40)] * 3, padding=0) == expected(heads)  # rows of padding are no drafts


SPEC = AttentionSpec(16, 1, 576, 512, BF16, BF16, 64, KVLayout.MLA)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": KVLayout.NHD}, "NHD"),
        ({"num_kv_heads": 2}, "2 in"),
        ({"window": 100}, "window"),
        ({"causal": False}, "causal"),
        ({"kv_scale": "tensor"}, "scale"),
        ({"q_dtype": torch.float64}, "float64"),
        ({"kv_dtype": torch.int8}, "int8"),
        ({"head_dim": 1088, "v_head_dim": 1024}, "1024"),
    ],
)
def test_refusals_name_what_is_refused(gpu: Gpu, changes: dict[str, Any], reason: str) -> None:
    ops, _ = ops_of(gpu)
    assert ops.supports("mla_attention", SPEC) is None
    refused = ops.supports("mla_attention", replace(SPEC, **changes))
    assert refused is not None
    assert reason in refused.reason


def test_what_is_refused_raises_as_well(gpu: Gpu) -> None:
    ops, planner = ops_of(gpu)
    batch = batch_of(DECODE)
    out = torch.zeros(batch.q_latent_THC.shape, dtype=BF16)
    plan = planner.plan(batch.meta)
    with pytest.raises(UnsupportedOp, match="float64"):
        ops.mla_attention(*batch.wide.plain, plan, out=out, softmax_scale=SCALE)
    with pytest.raises(UnsupportedOp, match="plan"):
        ops.mla_attention(*batch.plain, StepPlan(batch.meta), out=out, softmax_scale=SCALE)
    with pytest.raises(UnsupportedOp, match="as wide as q"):
        ops.mla_attention(batch.q_latent_THC[..., :16], batch.q_rope_THR, batch.kv, plan, out=out, softmax_scale=SCALE)
