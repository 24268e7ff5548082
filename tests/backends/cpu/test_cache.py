"""Native writes into the KV cache and moves of blocks: exact, in every layout, never outside what they were told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.backends.cpu.cache import CacheOps
from octavo.backends.cpu.elementwise import ElementwiseOps
from octavo.backends.cpu.native import NativeError
from octavo.core.backend.kv import KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
from octavo.core.backend.reference import cache as reference
from octavo.core.backend.reference import mla as reference_mla
from octavo.core.backend.specs import CacheSpec
from octavo.core.base.errors import UnsupportedOp

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS = 6, 5, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BYTES = (torch.float8_e4m3fn, torch.int8)
LAYOUTS = (KVLayout.HND, KVLayout.NHD, KVLayout.HDN)


@pytest.fixture
def ops(make_context):
    return CacheOps(make_context())


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_cache(dtype=torch.float32, layout=KVLayout.HND, head_dim=24, v_head_dim=20, fill=7.0):
    spec = KVCacheSpec(KV_HEADS, head_dim, v_head_dim, dtype, BLOCK_SIZE)
    storage = torch.empty(NUM_BLOCKS * spec.block_bytes, dtype=torch.uint8)
    kv = torch_kv_view(KVPool(NUM_BLOCKS, spec.block_bytes, storage), spec, layout)
    kv.key_NSKD.copy_(torch.full(kv.key_NSKD.shape, fill))
    kv.value_NSKD.copy_(torch.full(kv.value_NSKD.shape, fill))
    return kv


def copy_of(kv):
    return replace(kv, key_NSKD=kv.key_NSKD.clone(), value_NSKD=kv.value_NSKD.clone())


def same_bits(a, b):
    def bits(x):
        return x.contiguous().view(torch.uint8)

    return torch.equal(bits(a.key_NSKD), bits(b.key_NSKD)) and torch.equal(bits(a.value_NSKD), bits(b.value_NSKD))


class TestWriteKv:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("head_dim", [8, 16, 64, 72, 3])
    def test_equals_the_reference(self, make_context, isa, dtype, layout, head_dim):
        kv = make_cache(dtype, layout, head_dim, head_dim + 4)
        want = copy_of(kv)
        wide = normal(9, KV_HEADS + 2, 3 * head_dim + 8)  # more rows than slots, and strided ones
        k, v = wide[:, :KV_HEADS, 2 : 2 + head_dim], wide[:, 1 : 1 + KV_HEADS, head_dim : 2 * head_dim + 4]
        slots = torch.tensor([29, 0, -1, 14, 15, 3, -1])
        CacheOps(make_context(2, isa)).write_kv(k, v, kv, slots)
        reference.write_kv(k, v, want, slots)
        assert same_bits(kv, want)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rounds_to_nearest_even(self, make_context, isa, dtype):
        one, step = 1.0, torch.finfo(dtype).eps
        hard = [one + step / 2, one + 1.5 * step, one + step / 2 + 2**-20, 65504.0, 65519.9, 65520.0, 3.4e38, -3.4e38]
        hard += [6e-8, 2.9e-8, 3.0e-8, 1e-40, -1e-40, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]
        row = torch.tensor(hard)
        x = row[None, None].expand(1, KV_HEADS, len(row)).contiguous()
        kv = make_cache(dtype, head_dim=len(row), v_head_dim=len(row))
        CacheOps(make_context(1, isa)).write_kv(x, x, kv, torch.tensor([2]))
        torch.testing.assert_close(kv.key_NSKD[0, 2, 0], row.to(dtype), rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", BYTES, ids=str)
    @pytest.mark.parametrize("num_scales", [0, 1, KV_HEADS])
    @pytest.mark.parametrize("head_dim", [16, 24, 3])
    def test_one_byte_equals_the_reference(self, make_context, isa, layout, dtype, num_scales, head_dim):
        kv = make_cache(dtype, layout, head_dim, head_dim + 4)
        want = copy_of(kv)
        k, v = 90 * normal(4, KV_HEADS, head_dim, seed=1), 3 * normal(4, KV_HEADS, head_dim + 4, seed=2)
        slots = torch.tensor([29, 0, -1, 14])
        scales = {}
        if num_scales:
            scales = {"k_scale": 0.3 + torch.rand(num_scales), "v_scale": 0.03 + torch.rand(num_scales)}
        CacheOps(make_context(2, isa)).write_kv(k, v, kv, slots, **scales)
        reference.write_kv(k, v, want, slots, **scales)
        assert same_bits(kv, want)

    @pytest.mark.parametrize("dtype", BYTES, ids=str)
    def test_one_byte_rounds_to_nearest_even_and_saturates(self, make_context, isa, dtype):
        codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        values = codes[codes.isfinite()].sort().values.unique()
        middles = (values[1:] + values[:-1]) / 2
        nudged = [torch.nextafter(middles, torch.tensor(side)) for side in (torch.inf, -torch.inf)]
        beyond = torch.tensor([1e4, 464.0, 465.0, 3e38, 127.5, 128.0, torch.inf, torch.nan, 1e-40, 0.0, -0.0])
        row = torch.cat([values, middles, *nudged, beyond, -beyond])
        x = row[None, None].expand(1, KV_HEADS, len(row)).contiguous()
        kv = make_cache(dtype, head_dim=len(row), v_head_dim=len(row))
        want = copy_of(kv)
        CacheOps(make_context(1, isa)).write_kv(x, x, kv, torch.tensor([2]))
        reference.write_kv(x, x, want, torch.tensor([2]))
        got, right = kv.key_NSKD[0, 2, 0].float(), want.key_NSKD[0, 2, 0].float()
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)

    def test_many_tokens_use_the_pool(self, make_context):
        k = normal(NUM_BLOCKS * BLOCK_SIZE, KV_HEADS, 512)
        slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(0))
        kv = make_cache(head_dim=512, v_head_dim=512)
        CacheOps(make_context(3)).write_kv(k, k, kv, slots)
        assert torch.equal(kv.key_NSKD.flatten(0, 1)[slots], k)

    @pytest.mark.parametrize("slot", [-2, NUM_BLOCKS * BLOCK_SIZE, 2**40])
    def test_a_slot_outside_writes_nothing(self, ops, slot):
        kv = make_cache()
        want = copy_of(kv)
        with pytest.raises(NativeError, match="out of range"):
            ops.write_kv(normal(2, KV_HEADS, 24), normal(2, KV_HEADS, 20), kv, torch.tensor([0, slot]))
        assert same_bits(kv, want)

    def test_refusals(self, ops):
        kv = make_cache()
        k, v, slots = normal(2, KV_HEADS, 24), normal(2, KV_HEADS, 20), torch.tensor([0, 1])
        for scale in (torch.ones(2), torch.ones(1).half(), torch.ones(2 * KV_HEADS)[::2]):
            with pytest.raises(UnsupportedOp, match="scales"):
                ops.write_kv(k, v, kv, slots, k_scale=scale)
            with pytest.raises(UnsupportedOp, match="scales"):
                ops.write_kv(k, v, kv, slots, v_scale=scale)
        with pytest.raises(UnsupportedOp, match="fp32"):
            ops.write_kv(k.to(torch.bfloat16), v, kv, slots)
        with pytest.raises(UnsupportedOp, match="int64"):
            ops.write_kv(k, v, kv, slots.int())


class TestLatents:
    """Latents and rotary keys, in one slot; every op that touches them against the reference."""

    @staticmethod
    def make(dtype, fill=7.0):
        spec = KVCacheSpec(1, 24 + 8, 0, dtype, BLOCK_SIZE)
        storage = torch.empty(NUM_BLOCKS * spec.block_bytes, dtype=torch.uint8)
        kv = torch_kv_view(KVPool(NUM_BLOCKS, spec.block_bytes, storage), spec, KVLayout.MLA)
        kv.key_NSKD.copy_(torch.full(kv.key_NSKD.shape, fill))
        return kv

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
    def test_writes_equal_the_reference(self, make_context, isa, dtype):
        kv = self.make(dtype)
        want = copy_of(kv)
        wide = normal(6, 50)
        latent, rope, slots = wide[:, :24], wide[:, 30:38], torch.tensor([29, -1, 0, 14])
        CacheOps(make_context(2, isa)).write_mla(latent, rope, kv, slots)
        reference_mla.write_mla(latent, rope, want, slots)
        assert same_bits(kv, want)

    def test_a_slot_outside_writes_nothing(self, ops):
        kv = self.make(torch.float32)
        want = copy_of(kv)
        with pytest.raises(NativeError, match="out of range"):
            ops.write_mla(normal(1, 24), normal(1, 8), kv, torch.tensor([NUM_BLOCKS * BLOCK_SIZE]))
        assert same_bits(kv, want)

    def test_blocks_are_copied(self, ops):
        kv = self.make(torch.float32)
        ops.write_mla(normal(5, 24), normal(5, 8), kv, torch.arange(5))
        ops.copy_blocks(kv, torch.tensor([[0, 3]]))
        assert torch.equal(kv.key_NSKD[3], kv.key_NSKD[0])

    def test_a_cache_of_keys_and_values_is_refused(self, ops):
        with pytest.raises(UnsupportedOp, match="latents"):
            ops.write_mla(normal(1, 24), normal(1, 8), make_cache(), torch.tensor([0]))


class TestRopeWriteKv:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("rotary_dim", [24, 10])
    @pytest.mark.parametrize("layout", [KVLayout.HND, KVLayout.HDN])
    def test_equals_its_two_parts(self, make_context, isa, dtype, interleaved, rotary_dim, layout):
        context = make_context(2, isa)
        ops, rows = CacheOps(context), ElementwiseOps(context)
        fused = normal(4, 6 + 2 * KV_HEADS, 24)
        q, k, v = fused[:, :6], fused[:, 6 : 6 + KV_HEADS], fused[:, 6 + KV_HEADS :, :20]
        kept = fused.clone()
        positions, slots = torch.tensor([3, 0, 49, 7]), torch.tensor([11, -1, 0, 29])
        table = normal(50, rotary_dim, seed=1)
        kv = make_cache(dtype, layout)
        want, want_q, want_k = copy_of(kv), torch.empty_like(q), torch.empty_like(k)
        rows.rotary(q, k, positions, table, out_q=want_q, out_k=want_k, interleaved=interleaved)
        ops.write_kv(want_k, v, want, slots)
        ops.rope_write_kv(q, k, v, positions, table, kv, slots, out_q=q, interleaved=interleaved)
        assert same_bits(kv, want)
        assert torch.equal(q, want_q)  # in place
        assert torch.equal(fused[:, 6:], kept[:, 6:])  # k and v as they were

    def test_a_position_outside_writes_nothing(self, ops):
        kv = make_cache()
        want = copy_of(kv)
        q, k, v = normal(2, 6, 24), normal(2, KV_HEADS, 24), normal(2, KV_HEADS, 20)
        kept = q.clone()
        for bad in (-1, 50):
            with pytest.raises(NativeError, match="out of range"):
                ops.rope_write_kv(q, k, v, torch.tensor([0, bad]), normal(50, 24), kv, torch.tensor([0, 1]), out_q=q)
        assert same_bits(kv, want)
        assert torch.equal(q, kept)


class TestBlockMoves:
    @staticmethod
    def filled(dtype, layout):
        kv = make_cache(dtype, layout)
        kv.key_NSKD.copy_(normal(*kv.key_NSKD.shape))
        kv.value_NSKD.copy_(normal(*kv.value_NSKD.shape, seed=1))
        return kv

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_copies_in_order(self, ops, dtype, layout):
        kv = self.filled(dtype, layout)
        want = copy_of(kv)
        pairs = torch.tensor([[0, 1], [1, 2], [5, 0], [3, 3], [0, 4]])  # later pairs read what earlier ones wrote
        ops.copy_blocks(kv, pairs)
        reference.copy_blocks(want, pairs)
        assert same_bits(kv, want)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_gather_and_scatter(self, ops, dtype, layout):
        kv = self.filled(dtype, layout)
        ids = torch.tensor([4, 0, 4])
        k = torch.empty(3, BLOCK_SIZE, KV_HEADS, 24, dtype=dtype)
        v = torch.empty(3, BLOCK_SIZE, KV_HEADS, 20, dtype=dtype)
        ops.gather_blocks(kv, ids, out_k=k, out_v=v)
        assert torch.equal(k, kv.key_NSKD[ids])
        assert torch.equal(v, kv.value_NSKD[ids])
        other = make_cache(dtype, layout)
        ops.scatter_blocks(other, torch.tensor([1, 5, 2]), k, v)
        assert torch.equal(other.key_NSKD[[1, 5, 2]], k)
        assert torch.equal(other.value_NSKD[[1, 5, 2]], v)
        assert (other.key_NSKD[[0, 3, 4]] == 7).all()

    def test_enough_blocks_for_the_pool(self, make_context):
        spec = KVCacheSpec(2, 64, 64, torch.float32, 16)
        kv = KVCache(spec, KVLayout.NHD, 64, normal(64, 16, 2, 64), normal(64, 16, 2, 64, seed=1))
        want = copy_of(kv)
        pairs = torch.stack([torch.arange(63), torch.arange(1, 64)], dim=1)  # a chain: all become block 0
        CacheOps(make_context(3)).copy_blocks(kv, pairs)
        reference.copy_blocks(want, pairs)
        assert same_bits(kv, want)

    @pytest.mark.parametrize("bad", [-1, NUM_BLOCKS, 2**33])
    def test_an_id_outside_moves_nothing(self, ops, bad):
        kv = self.filled(torch.float32, KVLayout.HND)
        want = copy_of(kv)
        k, v = torch.zeros(2, BLOCK_SIZE, KV_HEADS, 24), torch.zeros(2, BLOCK_SIZE, KV_HEADS, 20)
        for move in (
            lambda: ops.copy_blocks(kv, torch.tensor([[0, 1], [2, bad]])),
            lambda: ops.scatter_blocks(kv, torch.tensor([0, bad]), k, v),
            lambda: ops.gather_blocks(kv, torch.tensor([0, bad]), out_k=k, out_v=v),
        ):
            with pytest.raises(NativeError, match="out of range"):
                move()
        assert same_bits(kv, want)
        assert (k == 0).all()

    def test_refuses_other_buffers(self, ops):
        kv = make_cache()
        k, v = torch.zeros(1, BLOCK_SIZE, KV_HEADS, 24), torch.zeros(1, BLOCK_SIZE, KV_HEADS, 20)
        with pytest.raises(UnsupportedOp, match="contiguous"):
            ops.gather_blocks(kv, torch.tensor([0]), out_k=k.to(torch.bfloat16), out_v=v)
        with pytest.raises(UnsupportedOp, match="contiguous"):
            ops.scatter_blocks(kv, torch.tensor([0]), k.transpose(1, 2), v)

    def test_no_moves(self, ops):
        ops.copy_blocks(make_cache(), torch.empty(0, 2, dtype=torch.int64))


class TestSupports:
    SPEC = CacheSpec(3, 64, 64, torch.float32, torch.bfloat16, 16, KVLayout.HND)

    def test_what_it_runs(self, ops):
        assert ops.supports("write_kv", self.SPEC) is None
        assert ops.supports("rope_write_kv", replace(self.SPEC, num_heads=9, rotary_dim=32, interleaved=True)) is None
        assert ops.supports("copy_blocks", replace(self.SPEC, kv_dtype=torch.float8_e4m3fn)) is None

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"x_dtype": torch.bfloat16}, "fp32"),
            ({"kv_dtype": torch.float8_e4m3fnuz}, "int8 or e4m3fn"),
            ({"layout": KVLayout.MLA}, "layout MLA"),
            ({"rotary_dim": 65}, "even part"),
            ({"head_dim": 577, "rotary_dim": 64}, "576"),
        ],
    )
    def test_what_it_refuses(self, ops, change, reason):
        assert reason in ops.supports("rope_write_kv", replace(self.SPEC, **change)).reason
