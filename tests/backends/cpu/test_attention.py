"""The native attention against the reference in float64, and its promise of equal bits whatever the batch.

Everything a call must not read holds NaN: the null block, unused slots, keys that left the window, table padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.attention import AttentionOps
from octavo.core.backend.kv import AttentionMetadata, KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference import attention as reference
from octavo.core.backend.reference import mla as reference_mla
from octavo.core.backend.specs import AttentionSpec, RowSpec
from octavo.core.base.errors import UnsupportedOp

U32 = 2.0**-24
SUBNORMAL = 2.0**-126  # below it fp32 has no relative precision
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

LIBRARY = native.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler, so no native kernels")
ISAS = LIBRARY.supported_isas() if LIBRARY is not None else []


def make_ops(threads: int = 2, isa: str | None = None) -> AttentionOps:
    assert LIBRARY is not None
    return AttentionOps(native.NativeContext(LIBRARY, threads, isa))


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """The oracle's products are small: a second thread only waits, and fights ours for the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ops() -> AttentionOps:
    return make_ops()


@dataclass(frozen=True)
class Shape:
    """A batch: (queries, KV length) of each request, and the geometry of heads and blocks."""

    requests: tuple[tuple[int, int], ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    v_head_dim: int = 0  # 0: head_dim
    block_size: int = 16
    dtype: torch.dtype = FP32
    layout: KVLayout = KVLayout.HND

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim


@dataclass
class Batch:
    """One call's tensors; keys[b] and values[b] are what was written for request b."""

    q: torch.Tensor
    kv: KVCache
    meta: AttentionMetadata


@dataclass
class Tokens:
    """Queries, keys and values of every position of every request, so that one token is the same in any batch."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def draw(shape: Shape, seed: int = 0) -> Tokens:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, heads: int, width: int) -> torch.Tensor:
        return torch.randn(length, heads, width, generator=generator)

    lengths = [max(length, queries) for queries, length in shape.requests]
    return Tokens(
        [normal(n, shape.heads, shape.head_dim) for n in lengths],
        [normal(n, shape.kv_heads, shape.head_dim).to(shape.dtype) for n in lengths],
        [normal(n, shape.kv_heads, shape.value_dim).to(shape.dtype) for n in lengths],
    )


def empty_cache(shape: Shape, num_blocks: int) -> KVCache:
    """A pool of NaN in the shape's layout."""
    pool = pool_of(shape, num_blocks)
    pool.storage.view(shape.dtype).fill_(torch.nan)
    return torch_kv_view(pool, spec_of(shape), shape.layout)


def spec_of(shape: Shape) -> KVCacheSpec:
    return KVCacheSpec(shape.kv_heads, shape.head_dim, shape.value_dim, shape.dtype, shape.block_size)


def pool_of(shape: Shape, num_blocks: int) -> KVPool:
    nbytes = spec_of(shape).block_bytes
    return KVPool(num_blocks, nbytes, torch.empty(num_blocks * nbytes, dtype=torch.uint8))


def lay_out(shape: Shape, tokens: Tokens, *, window: int | None = None, seed: int = 0) -> Batch:
    """Shuffled blocks from 1 on; block 0 and whatever no query may see stays NaN."""
    counts = [-(-length // shape.block_size) for _, length in shape.requests]
    num_blocks = 1 + sum(counts)
    order = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed))).to(torch.int32)
    kv = empty_cache(shape, num_blocks)
    assert kv.key_NSKD is not None
    assert kv.value_NSKD is not None
    table = torch.zeros(len(counts), max(counts, default=0) + 3, dtype=torch.int32)
    queries, taken = [], 0
    for b, (num_queries, length) in enumerate(shape.requests):
        table[b, : counts[b]] = order[taken : taken + counts[b]]
        taken += counts[b]
        first = 0 if window is None else max(0, length - num_queries - window + 1)
        positions = torch.arange(first, length)
        ids = table[b].to(torch.int64)[positions // shape.block_size]
        kv.key_NSKD[ids, positions % shape.block_size] = tokens.k[b][first:length]
        kv.value_NSKD[ids, positions % shape.block_size] = tokens.v[b][first:length]
        queries.append(tokens.q[b][max(length, num_queries) - num_queries :])
    starts = torch.tensor([0, *(n for n, _ in shape.requests)]).cumsum(0).to(torch.int32)
    meta = AttentionMetadata(
        num_requests=len(counts),
        num_tokens=int(starts[-1]),
        max_query_len=max(n for n, _ in shape.requests),
        max_seq_len=max(length for _, length in shape.requests),
        query_start_loc=starts,
        seq_lens=torch.tensor([length for _, length in shape.requests], dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.full((int(starts[-1]),), -1),
        block_size=shape.block_size,
    )
    return Batch(torch.cat(queries), kv, meta)


def run(
    ops: AttentionOps, batch: Batch, poison: float = torch.nan, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    width = batch.kv.spec.v_head_dim
    out = torch.full((*batch.q.shape[:2], width), poison)
    lse = torch.full(batch.q.shape[:2], poison)
    options.setdefault("softmax_scale", batch.q.shape[2] ** -0.5)
    ops.paged_attention(batch.q, batch.kv, ops.plan(batch.meta), out=out, lse=lse, **options)
    return out, lse


def oracle(batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64: out, lse, and A = sum of p |v| for the bound."""
    options.setdefault("softmax_scale", batch.q.shape[2] ** -0.5)
    key, value = batch.kv.key_NSKD, batch.kv.value_NSKD
    assert key is not None
    assert value is not None
    both = torch.cat([value.double(), value.double().abs()], dim=-1)
    out = torch.empty(*batch.q.shape[:2], both.shape[3], dtype=torch.float64)
    lse = torch.empty(batch.q.shape[:2], dtype=torch.float64)
    kv = replace(batch.kv, key_NSKD=key.double(), value_NSKD=both)
    reference.paged_attention(batch.q.double(), kv, StepPlan(batch.meta), out=out, lse=lse, **options)
    return out[..., : value.shape[3]], lse, out[..., value.shape[3] :]


def check(ops: AttentionOps, shape: Shape, **options: Any) -> None:
    """|e| <= 2 u |o| + 4 u Q + (2 (sqrt(D) u sigma + 4 u) + sqrt(L) u) A, Q <= A (conformance.md, statistical lane).

    sigma, the largest sum of |q k| times the scale, is taken over all keys of the pool; ALiBi's bias adds to it.
    """
    batch = lay_out(shape, draw(shape), window=options.get("window"))
    out, lse = run(ops, batch, **options)
    want, want_lse, spread = oracle(batch, **options)
    scale = options.get("softmax_scale", shape.head_dim**-0.5)
    assert batch.kv.key_NSKD is not None
    keys = batch.kv.key_NSKD.float().nan_to_num(0.0).abs().flatten(0, 1)
    grouped = batch.q.abs().unflatten(1, (shape.kv_heads, -1))
    sigma = float(torch.einsum("tkgd,lkd->tkgl", grouped, keys).max() * scale) if keys.numel() else 0.0
    longest = batch.meta.max_seq_len
    if options.get("alibi_slopes_H") is not None:
        sigma += float(options["alibi_slopes_H"].max()) * longest
    score_error = 2 * (shape.head_dim**0.5 * U32 * sigma + 4 * U32)
    bound = 2 * U32 * want.abs() + (4 * U32 + score_error + longest**0.5 * U32) * spread + SUBNORMAL
    assert torch.isfinite(out).all()
    excess = (out - want).abs() - bound
    assert (excess <= 0).all(), f"{shape}: error exceeds its bound by {excess.max():.3g}"
    empty = want_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    error = (lse - want_lse)[~empty].abs()
    assert (error <= score_error + longest**0.5 * U32 + 4 * U32 * want_lse[~empty].abs()).all()


MIXED = ((1, 1), (1, 130), (5, 5), (40, 75), (1, 513), (3, 600), (0, 0), (1, 16))


class TestAgainstOracle:
    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
    def test_instruction_sets(self, isa: str, dtype: torch.dtype) -> None:
        for layout, head_dim in ((KVLayout.HND, 64), (KVLayout.NHD, 80), (KVLayout.HDN, 72)):
            check(make_ops(2, isa), Shape(MIXED, dtype=dtype, layout=layout, head_dim=head_dim))

    @pytest.mark.parametrize("head_dim", [8, 32, 40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 36, 3])
    def test_head_sizes(self, ops: AttentionOps, head_dim: int) -> None:
        check(ops, Shape(MIXED, head_dim=head_dim))
        check(ops, Shape(MIXED, head_dim=head_dim, dtype=BF16, block_size=32))
        check(ops, Shape(MIXED, head_dim=head_dim, layout=KVLayout.HDN))

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 24), (48, 100)])
    def test_value_heads_of_another_size(self, ops: AttentionOps, head_dim: int, v_head_dim: int) -> None:
        check(ops, Shape(MIXED, head_dim=head_dim, v_head_dim=v_head_dim))

    @pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 13, 16, 32, 73, 80])
    def test_group_sizes(self, ops: AttentionOps, group: int) -> None:
        check(ops, Shape(((1, 100), (9, 30), (50, 50)), heads=2 * group, kv_heads=2, head_dim=32))

    @pytest.mark.parametrize("block_size", [1, 2, 7, 16, 32, 48, 64, 100, 128, 256, 1000])
    def test_block_sizes_and_contexts(self, ops: AttentionOps, block_size: int) -> None:
        edges = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, block_size - 1, block_size, block_size + 1}
        edges |= {511, 512, 513, 1023, 1025}
        requests = tuple((min(1, length), length) for length in sorted(edges))
        for layout in (KVLayout.HND, KVLayout.HDN) if block_size % 16 == 0 else (KVLayout.HND,):
            check(ops, Shape(requests, heads=3, kv_heads=1, head_dim=32, block_size=block_size, layout=layout))

    def test_long_contexts(self, ops: AttentionOps) -> None:
        for length in (2047, 2048, 2049, 5000):
            check(ops, Shape(((1, length), (20, length)), heads=4, kv_heads=1, head_dim=32))

    @pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 65, 500, 512, 700, 5000])
    def test_windows(self, ops: AttentionOps, window: int) -> None:
        shape = Shape(((1, 1), (1, 700), (30, 700), (90, 90), (7, 520), (600, 600)), heads=3, kv_heads=1, head_dim=32)
        check(ops, shape, window=window)
        check(ops, replace(shape, layout=KVLayout.HDN), window=window)

    def test_no_causal_mask(self, ops: AttentionOps) -> None:
        check(ops, Shape(((10, 10), (3, 200), (80, 130))), causal=False)
        check(ops, Shape(((10, 10), (3, 200), (80, 130))), causal=False, window=20)

    @pytest.mark.parametrize("scale", [0.001, 0.125, 3.0])
    def test_softcap(self, ops: AttentionOps, scale: float) -> None:
        for softcap in (0.5, 30.0, 50.0):
            check(ops, Shape(MIXED), softcap=softcap, softmax_scale=scale)

    def test_softcap_shows_on_large_scores(self, ops: AttentionOps) -> None:
        batch = lay_out(Shape(MIXED), draw(Shape(MIXED)))
        plain, capped = (run(ops, batch, softmax_scale=3.0, **o)[0] for o in ({}, {"softcap": 5.0}))
        assert (plain - capped).abs().max() > 0.1

    def test_sinks(self, ops: AttentionOps) -> None:
        sinks = torch.tensor([-30.0, -1.0, 0.0, 2.0, 9.0, 100.0])
        check(ops, Shape(MIXED), sinks_H=sinks)
        check(ops, Shape(MIXED), sinks_H=sinks, window=9)

    def test_alibi(self, ops: AttentionOps) -> None:
        slopes = 2.0 ** -torch.arange(1.0, 7.0)
        check(ops, Shape(MIXED), alibi_slopes_H=slopes)
        check(ops, Shape(((20, 70), (1, 300))), alibi_slopes_H=slopes, window=33, softcap=20.0)

    def test_rows_with_nothing_to_see(self, ops: AttentionOps) -> None:
        shape = Shape(((8, 5), (4, 0), (1, 3)))  # more queries than keys: the first stand before key 0
        for sinks in (None, torch.ones(6)):
            batch = lay_out(shape, draw(shape))
            out, lse = run(ops, batch, sinks_H=sinks)
            for rows in (slice(0, 3), slice(8, 12)):
                assert (out[rows] == 0).all()
                assert (lse[rows] == -torch.inf).all()
            assert torch.isfinite(lse[3:8]).all()
        check(ops, shape)

    def test_a_call_without_requests_or_tokens(self, ops: AttentionOps) -> None:
        run(ops, lay_out(Shape(((0, 10), (0, 0))), draw(Shape(((0, 10), (0, 0))))))

    def test_large_scores_saturate_exactly(self, ops: AttentionOps) -> None:
        shape = Shape(((1, 900),), heads=2, kv_heads=2)
        tokens = draw(shape)
        tokens.k[0] = torch.where(tokens.k[0] > 0, 1.0, -1.0)
        for target in (0, 15, 16, 63, 64, 511, 512, 899):
            tokens.q[0][-1] = 24 * tokens.k[0][target]
            out, _ = run(ops, lay_out(shape, tokens), softmax_scale=1.0)
            assert torch.equal(out[0], tokens.v[0][target])

    def test_a_nan_that_is_seen_comes_out(self, ops: AttentionOps) -> None:
        shape = Shape(((1, 200), (1, 200)))
        tokens = draw(shape)
        tokens.k[0][70] = torch.nan
        out, lse = run(ops, lay_out(shape, tokens))
        assert out[0].isnan().all()
        assert lse[0].isnan().all()
        assert torch.isfinite(out[1]).all()

    def test_shared_blocks(self, ops: AttentionOps) -> None:
        shape = Shape(((1, 300), (1, 300)))
        tokens = draw(shape)
        batch = lay_out(shape, tokens)
        batch.meta.block_table[1] = batch.meta.block_table[0]
        batch.q[1] = batch.q[0]
        out, _ = run(ops, batch)
        assert torch.equal(out[0], out[1])

    def test_strided_queries_and_outputs(self, ops: AttentionOps) -> None:
        batch = lay_out(Shape(MIXED), draw(Shape(MIXED)))
        want, want_lse = run(ops, batch)
        wide = torch.randn(batch.q.shape[0], 10, 100)
        wide[:, 2:8, 5:69] = batch.q
        out = torch.full((batch.q.shape[0], 9, 80), 7.0)
        lse = torch.full((batch.q.shape[0], 11), 7.0)
        ops.paged_attention(
            wide[:, 2:8, 5:69],
            batch.kv,
            ops.plan(batch.meta),
            out=out[:, 1:7, 3:67],
            lse=lse[:, 2:8],
            softmax_scale=0.125,
        )
        assert torch.equal(out[:, 1:7, 3:67], want)
        assert torch.equal(lse[:, 2:8], want_lse)
        out[:, 1:7, 3:67] = lse[:, 2:8] = 7.0
        assert (out == 7).all()
        assert (lse == 7).all()

    def test_offsets_past_32_bits(self, ops: AttentionOps) -> None:
        # The pool is address space; only the touched blocks become memory.
        shape = Shape(((2, 40),), heads=2, kv_heads=1, dtype=BF16)
        block_elements = shape.block_size * shape.head_dim
        far = 2**31 // block_elements + 5
        storage = torch.empty((far + 8) * block_elements, dtype=BF16).view(-1, shape.block_size, 1, shape.head_dim)
        tokens = draw(shape)
        batch = lay_out(shape, tokens)
        assert batch.kv.key_NSKD is not None
        assert batch.kv.value_NSKD is not None
        near = batch.meta.block_table[0, :3].to(torch.int64)
        storage[far : far + 3] = batch.kv.key_NSKD[near]
        storage[far + 3 : far + 6] = batch.kv.value_NSKD[near]
        kv = replace(batch.kv, num_blocks=far + 3, key_NSKD=storage, value_NSKD=storage[3:])
        table = batch.meta.block_table.clone()
        table[0, :3] = torch.arange(far, far + 3)
        moved = Batch(batch.q, kv, replace(batch.meta, block_table=table))
        assert torch.equal(run(ops, moved)[0], run(ops, batch)[0])


class TestEqualBits:
    """A row's result is a function of its own query and keys."""

    SHAPES = (
        Shape(((200, 200), (90, 700), (1, 1300), (3, 40))),
        Shape(((200, 200), (90, 700), (1, 1300), (3, 40)), heads=8, kv_heads=1, head_dim=80, dtype=BF16, block_size=32),
        Shape(((200, 200), (90, 700), (1, 1300), (3, 40)), heads=2, kv_heads=2, head_dim=96, dtype=FP16, block_size=7),
        Shape(((200, 200), (90, 700), (1, 1300), (3, 40)), heads=9, kv_heads=3, layout=KVLayout.HDN),
    )
    OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": 50}, {"window": 600, "softcap": 20.0})

    @pytest.mark.parametrize("shape", SHAPES, ids=["fp32", "bf16", "fp16", "lanes"])
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_alone_and_in_a_batch(self, ops: AttentionOps, shape: Shape, options: dict[str, Any]) -> None:
        tokens = draw(shape)
        out, lse = run(ops, lay_out(shape, tokens, window=options.get("window")), **options)
        row = 0
        for b, request in enumerate(shape.requests):
            own = Tokens(tokens.q[b : b + 1], tokens.k[b : b + 1], tokens.v[b : b + 1])
            alone = replace(shape, requests=(request,))
            got, got_lse = run(ops, lay_out(alone, own, window=options.get("window"), seed=9), **options)
            assert torch.equal(got, out[row : row + request[0]])
            assert torch.equal(got_lse, lse[row : row + request[0]])
            row += request[0]

    @pytest.mark.parametrize("chunk", [1, 7, 16, 64])
    @pytest.mark.parametrize("shape", SHAPES, ids=["fp32", "bf16", "fp16", "lanes"])
    def test_prefill_in_chunks(self, ops: AttentionOps, shape: Shape, chunk: int) -> None:
        total = 200 if chunk > 1 else 140
        whole = replace(shape, requests=((total, total),))
        tokens = draw(whole)
        for options in self.OPTIONS:
            window = options.get("window")
            out, lse = run(ops, lay_out(whole, tokens, window=window), **options)
            for end in range(chunk, total + chunk, chunk):
                length = min(end, total)
                queries = length - (end - chunk)
                part = replace(shape, requests=((queries, length),))
                cut = Tokens([tokens.q[0][:length]], tokens.k, tokens.v)
                got, got_lse = run(ops, lay_out(part, cut, window=window), **options)
                assert torch.equal(got, out[length - queries : length])
                assert torch.equal(got_lse, lse[length - queries : length])

    @pytest.mark.parametrize("shape", SHAPES, ids=["fp32", "bf16", "fp16", "lanes"])
    def test_threads_and_their_splits(self, shape: Shape) -> None:
        lone = replace(shape, requests=((1, 3000),))  # with more threads its splits are shared out
        for each in (shape, lone, replace(shape, requests=((2, 1100), (1, 5)))):
            batch = lay_out(each, draw(each))
            want = run(make_ops(1), batch)
            for threads in (2, 3, 5):
                got = run(make_ops(threads), batch)
                assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def test_instruction_sets(self) -> None:
        for shape in self.SHAPES:
            batch = lay_out(shape, draw(shape))
            results = [run(make_ops(2, isa), batch, softcap=30.0, sinks_H=torch.ones(shape.heads)) for isa in ISAS]
            for out, lse in results[1:]:
                assert torch.equal(out, results[0][0])
                assert torch.equal(lse, results[0][1])

    @pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
    @pytest.mark.parametrize("isa", ISAS)
    def test_layouts(self, isa: str, dtype: torch.dtype) -> None:
        ops = make_ops(2, isa)
        mixed = ((200, 200), (90, 700), (1, 1300), (1, 77), (3, 40))
        for group, head_dim, block_size in ((1, 64, 16), (2, 40, 32), (3, 64, 16), (5, 80, 48), (13, 24, 64)):
            shape = Shape(mixed, 2 * group, 2, head_dim, block_size=block_size, dtype=dtype)
            tokens = draw(shape)
            for options in self.OPTIONS:
                window = options.get("window")
                rows, lanes, heads = (
                    run(ops, lay_out(replace(shape, layout=layout), tokens, window=window), **options)
                    for layout in (KVLayout.HND, KVLayout.HDN, KVLayout.NHD)
                )
                assert all(torch.equal(a, b) for a, b in zip(lanes, rows, strict=True))
                assert all(torch.equal(a, b) for a, b in zip(heads, rows, strict=True))

    def test_repeated_calls(self, ops: AttentionOps) -> None:
        batch = lay_out(self.SHAPES[0], draw(self.SHAPES[0]))
        want = run(ops, batch)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(run(ops, batch, poison=-1e30), want, strict=True))


class TestContiguous:
    """`attention` is the paged kernel over one long block."""

    @pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
    def test_equals_paged(self, ops: AttentionOps, dtype: torch.dtype) -> None:
        shape = Shape(((20, 20), (1, 130), (0, 0), (30, 600)), dtype=dtype)
        tokens = draw(shape)
        batch = lay_out(shape, tokens)
        want, want_lse = run(ops, batch, window=100)
        starts = torch.tensor([0, *(length for _, length in shape.requests)]).cumsum(0).to(torch.int32)
        k, v = (torch.cat([x[:n] for x, (_, n) in zip(xs, shape.requests, strict=True)]) for xs in (tokens.k, tokens.v))
        out, lse = torch.empty_like(want), torch.empty_like(want_lse)
        ops.attention(
            batch.q, k, v, batch.meta.query_start_loc, starts, out=out, lse=lse, softmax_scale=0.125, window=100
        )
        assert torch.equal(out, want)
        assert torch.equal(lse, want_lse)

    def test_refuses_other_starts(self, ops: AttentionOps) -> None:
        x = torch.zeros(2, 1, 8)
        with pytest.raises(ValueError, match="int32"):
            ops.attention(x, x, x, torch.tensor([0, 2]), torch.tensor([0, 2]), out=x.clone(), softmax_scale=1.0)


class TestMerge:
    def test_halves_make_the_whole(self, ops: AttentionOps) -> None:
        generator = torch.Generator().manual_seed(3)
        q, k, v = (torch.randn(n, 4, 40, generator=generator) for n in (9, 50, 50))
        rows = torch.tensor([0, 9], dtype=torch.int32)
        parts = []
        for keys in (slice(0, 50), slice(0, 17), slice(17, 50)):
            out, lse = torch.empty(9, 4, 40), torch.empty(9, 4)
            ends = torch.tensor([0, keys.stop - keys.start], dtype=torch.int32)
            ops.attention(q, k[keys], v[keys], rows, ends, out=out, lse=lse, causal=False, softmax_scale=0.2)
            parts.append((out, lse))
        out, lse = torch.empty(9, 4, 40), torch.empty(9, 4)
        ops.merge_attention(*parts[1], *parts[2], out=out, lse=lse)
        # Each side carries its own rounding of about sqrt(D) u |s|; |s| stays below 16 here.
        torch.testing.assert_close(out, parts[0][0], atol=2e-5, rtol=0)
        torch.testing.assert_close(lse, parts[0][1], atol=2e-5, rtol=0)

    def test_an_empty_part_adds_nothing(self, ops: AttentionOps) -> None:
        generator = torch.Generator().manual_seed(4)
        a, b = (torch.randn(3, 2, 24, generator=generator) for _ in range(2))
        lse_a, lse_b = (torch.randn(3, 2, generator=generator) for _ in range(2))
        lse_a[0], lse_b[1] = -torch.inf, -torch.inf
        lse_a[2], lse_b[2] = -torch.inf, -torch.inf
        a[0], b[1], a[2], b[2] = torch.nan, torch.inf, torch.nan, torch.nan
        out, lse = torch.empty_like(a), torch.empty_like(lse_a)
        ops.merge_attention(a, lse_a, b, lse_b, out=out, lse=lse)
        assert torch.equal(out[0], b[0])
        assert torch.equal(out[1], a[1])
        assert (out[2] == 0).all()
        assert torch.equal(lse, torch.stack([lse_b[0], lse_a[1], torch.full((2,), -torch.inf)]))
        ops.merge_attention(a, lse_a, b, lse_b, out=a, lse=lse_a)
        assert torch.equal(a, out)
        assert torch.equal(lse_a, lse)


class TestLatents:
    """Absorbed latent attention against the reference in float64; queries come in two parts, wherever they lie."""

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("dtype", [FP32, BF16, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize(("heads", "rank", "rope"), [(3, 64, 16), (80, 32, 8), (2, 512, 64), (4, 20, 6)])
    def test_equals_the_reference(self, isa: str, dtype: torch.dtype, heads: int, rank: int, rope: int) -> None:
        shape = Shape(
            ((1, 700), (5, 5), (70, 200), (1, 1)), heads=heads, kv_heads=1, head_dim=rank + rope, dtype=dtype,
            layout=KVLayout.MLA, v_head_dim=rank,
        )  # fmt: skip
        spec = KVCacheSpec(1, rank + rope, 0, dtype, 16)
        pool = KVPool(80, spec.block_bytes, torch.empty(80 * spec.block_bytes, dtype=torch.uint8))
        kv = torch_kv_view(pool, spec, KVLayout.MLA)
        assert kv.key_NSKD is not None
        generator = torch.Generator().manual_seed(5)
        kv.key_NSKD.copy_(torch.randn(kv.key_NSKD.shape, generator=generator))
        wide = replace(shape, dtype=FP32, layout=KVLayout.HND)
        meta = lay_out(wide, draw(wide)).meta
        tokens = int(meta.query_start_loc[-1])
        q_latent = torch.randn(tokens, heads, rank, generator=generator)
        q_rope = torch.randn(tokens, heads, rope + 3, generator=generator)[..., :rope]
        out, lse = torch.empty(tokens, heads, rank), torch.empty(tokens, heads)
        ops = make_ops(2, isa)
        ops.mla_attention(q_latent, q_rope, kv, ops.plan(meta), out=out, lse=lse, softmax_scale=0.1)
        right, right_lse = out.double(), lse.double()
        reference_mla.mla_attention(
            q_latent.double(), q_rope.double(), kv, StepPlan(meta), out=right, lse=right_lse, softmax_scale=0.1
        )
        torch.testing.assert_close(out.double(), right, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


class TestOneByte:
    """KV of one byte: what codes and scales stand for, by the reference in float64 over the same codes."""

    @pytest.mark.parametrize("isa", ISAS)
    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("layout", [KVLayout.HND, KVLayout.HDN])
    @pytest.mark.parametrize("num_scales", [0, 1, 2])
    def test_equals_the_reference(self, isa: str, dtype: torch.dtype, layout: KVLayout, num_scales: int) -> None:
        shape = Shape(((1, 130), (5, 5), (70, 200), (1, 1)), dtype=dtype, layout=layout, head_dim=72, v_head_dim=40)
        kv = torch_kv_view(pool_of(shape, 40), spec_of(shape), layout)
        generator = torch.Generator().manual_seed(3)
        for view in (kv.key_NSKD, kv.value_NSKD):
            assert view is not None
            codes = torch.randint(-127, 128, view.shape, generator=generator)
            view.copy_(codes if dtype == torch.int8 else codes.float() / 64)
        batch = lay_out(replace(shape, dtype=FP32), draw(replace(shape, dtype=FP32)))
        scales = {}
        if num_scales:
            scales = {
                "k_scale": torch.tensor([0.02, 0.05])[:num_scales],
                "v_scale": torch.tensor([0.3, 0.1])[:num_scales],
            }
        plan = make_ops(2, isa)
        out, lse = torch.empty(*batch.q.shape[:2], 40), torch.empty(batch.q.shape[:2])
        softmax = {"softmax_scale": 0.01 if dtype == torch.int8 and not num_scales else 0.1}
        plan.paged_attention(batch.q, kv, plan.plan(batch.meta), out=out, lse=lse, **softmax, **scales)
        right, right_lse = out.double(), lse.double()
        wide = {name: scale.double() for name, scale in scales.items()}
        reference.paged_attention(
            batch.q.double(), kv, StepPlan(batch.meta), out=right, lse=right_lse, **softmax, **wide
        )
        torch.testing.assert_close(out.double(), right, rtol=2e-5, atol=2e-5 * float(right.abs().max()))
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)


class TestRefusals:
    SPEC = AttentionSpec(6, 2, 64, 64, FP32, FP32, 16, KVLayout.HND)

    def test_supports(self, ops: AttentionOps) -> None:
        assert ops.supports("paged_attention", self.SPEC) is None
        assert ops.supports("attention", replace(self.SPEC, window=5, softcap=True, sinks=True, alibi=True)) is None
        assert ops.supports("merge_attention", RowSpec(64, FP32)) is None
        for change, reason in (
            ({"q_dtype": BF16}, "queries are fp32"),
            ({"kv_dtype": torch.float8_e4m3fnuz}, "int8 or e4m3fn"),
            ({"layout": KVLayout.MLA}, "otherwise"),
            ({"layout": KVLayout.HDN, "block_size": 24}, "multiple of 16"),
            ({"head_dim": 577}, "576"),
            ({"num_heads": 5}, "no multiple"),
        ):
            refusal = ops.supports("paged_attention", replace(self.SPEC, **change))
            assert refusal is not None
            assert reason in refusal.reason
        assert ops.supports("merge_attention", RowSpec(64, BF16)) is not None
        assert ops.supports("mla_attention", self.SPEC) is not None
        assert ops.supports("mla_attention", replace(self.SPEC, layout=KVLayout.MLA)) is None

    def test_calls(self, ops: AttentionOps) -> None:
        batch = lay_out(Shape(MIXED), draw(Shape(MIXED)))
        with pytest.raises(UnsupportedOp, match="scales"):
            run(ops, batch, k_scale=torch.ones(3))
        with pytest.raises(UnsupportedOp, match="sinks"):
            run(ops, batch, sinks_H=torch.ones(6, dtype=BF16))
        with pytest.raises(UnsupportedOp, match="fp32"):
            run(ops, replace(batch, q=batch.q.to(BF16)))
        with pytest.raises(UnsupportedOp, match="plan"):
            ops.paged_attention(batch.q, batch.kv, StepPlan(batch.meta), out=batch.q.clone(), softmax_scale=1.0)
        with pytest.raises(ValueError, match="int32"):
            ops.plan(replace(batch.meta, seq_lens=batch.meta.seq_lens.long()))
        with pytest.raises(native.NativeError, match="out of range"):
            run(ops, replace(batch, meta=replace(batch.meta, block_table=batch.meta.block_table[:, :5])))
        odd = Shape(((1, 5),), block_size=8, layout=KVLayout.HDN)
        with pytest.raises(native.NativeError, match="out of range"):
            run(ops, lay_out(odd, draw(odd)))
