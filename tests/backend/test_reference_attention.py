"""The reference's attention against a row-by-row float64 oracle, on ragged batches with poisoned slots."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.core.backend import KVCacheSpec, KVLayout, ReferenceOps, StepPlan
from octavo.core.backend.reference import attention as reference_attention
from tests.backend.ragged import Ragged, attention_oracle, make_ragged

ops = ReferenceOps(torch.device("cpu"))
QUERIES = [1, 5, 0, 3, 7, 1, 2]
LENGTHS = [9, 5, 4, 17, 8, 1, 19]


def ragged(dtype: torch.dtype = torch.float64, *, kv_heads: int = 2, dim: int = 6, block: int = 4, **kw) -> Ragged:
    spec = KVCacheSpec(kv_heads, dim, dim, dtype, block, kw.pop("window", None))
    generator = torch.Generator().manual_seed(kw.pop("seed", 0))
    return make_ragged(kw.pop("queries", QUERIES), kw.pop("lengths", LENGTHS), spec, generator=generator, **kw)


def queries(batch: Ragged, heads: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    dim = batch.kv.spec.head_dim
    wide = torch.randn(batch.meta.num_tokens, heads, 2 * dim, generator=torch.Generator().manual_seed(7))
    return wide.to(dtype)[..., :dim]  # strided, as a slice of a fused projection is


def attend(batch: Ragged, q: torch.Tensor, **kw) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*q.shape[:2], batch.kv.spec.v_head_dim), math.nan, dtype=q.dtype)
    lse = torch.full(q.shape[:2], math.nan, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    ops.paged_attention(q, batch.kv, StepPlan(batch.meta), out=out, lse=lse, softmax_scale=0.3, **kw)
    return out, lse


VARIANTS = {
    "plain": {},
    "not causal": {"causal": False},
    "window 1": {"window": 1},
    "window of a block": {"window": 4},
    "window beyond": {"window": 1000},
    "window, not causal": {"window": 3, "causal": False},
    "softcap": {"softcap": 0.5},
    "sinks": {"sinks_H": torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -2.0], dtype=torch.float64)},
    "alibi": {"alibi_slopes_H": torch.tensor([0.5, 0.25, 0.1, 1.0, 0.3, 0.7], dtype=torch.float64)},
    "scales": {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([4.0])},
    "scales per head": {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([4.0, 0.25])},
    "all": {
        "window": 5,
        "softcap": 2.0,
        "sinks_H": torch.linspace(-1, 1, 6, dtype=torch.float64),
        "alibi_slopes_H": torch.linspace(0.1, 0.6, 6, dtype=torch.float64),
        "k_scale": torch.tensor([2.0, 0.5]),
    },
}


@pytest.mark.parametrize("layout", [KVLayout.NHD, KVLayout.HND, KVLayout.HDN])
@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_attention_equals_the_oracle(variant: str, layout: KVLayout) -> None:
    batch = ragged(layout=layout)
    q = queries(batch, heads=6)
    out, lse = attend(batch, q, **VARIANTS[variant])
    expected, expected_lse = attention_oracle(q, batch, softmax_scale=0.3, **VARIANTS[variant])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (2, 1), (3, 3), (9, 3), (5, 1)])
@pytest.mark.parametrize("block", [1, 2, 16, 256])
def test_head_ratios_and_block_sizes(heads: int, kv_heads: int, block: int) -> None:
    batch = ragged(kv_heads=kv_heads, block=block)
    q = queries(batch, heads)
    out, _ = attend(batch, q)
    torch.testing.assert_close(out, attention_oracle(q, batch, softmax_scale=0.3)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float8_e4m3fn, 1e-5)],
)
def test_storage_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    batch = ragged(dtype)
    q_dtype = torch.float32 if dtype.itemsize == 1 else dtype
    q = queries(batch, 4, q_dtype)
    out, lse = attend(batch, q)
    expected, expected_lse = attention_oracle(q, batch, softmax_scale=0.3)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_blocks_that_left_the_window_may_belong_to_somebody_else() -> None:
    batch = ragged(queries=[2], lengths=[20], window=5)
    q = queries(batch, 2)
    before, _ = attend(batch, q, window=5)
    assert batch.kv.key_NSKD is not None
    assert batch.kv.value_NSKD is not None
    # The first query stands at position 18 and sees keys from 14 on: blocks 0 .. 2 are gone.
    for block in batch.meta.block_table[0, :3].tolist():
        batch.kv.key_NSKD[block] = math.nan
        batch.kv.value_NSKD[block] = math.nan
    after, _ = attend(batch, q, window=5)
    assert torch.equal(before, after)


@pytest.mark.parametrize("sinks", [None, torch.zeros(2)])
def test_a_row_that_sees_nothing_gives_zero(sinks: torch.Tensor | None) -> None:
    batch = ragged(queries=[4, 1], lengths=[2, 3], dim=6, kv_heads=2)  # rows 0 and 1 stand before the first key
    q = queries(batch, 2)
    out, lse = attend(batch, q, sinks_H=sinks)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full_like(lse[:2], -math.inf))
    assert out[2:].isfinite().all()


def test_a_request_without_keys_gives_zero() -> None:
    batch = ragged(queries=[1, 1], lengths=[0, 3])
    out, lse = attend(batch, queries(batch, 2), causal=False)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert (lse[0] == -math.inf).all()


def test_a_tile_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged()
    q = queries(batch, 4)
    whole, _ = attend(batch, q, window=6)
    monkeypatch.setattr(reference_attention, "TILE_ROWS", 2)
    tiled, _ = attend(batch, q, window=6)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", ["plain", "not causal", "window of a block", "softcap", "sinks"])
def test_contiguous_attention_equals_the_oracle(variant: str) -> None:
    batch = ragged()
    q = queries(batch, 6)
    kv_start = torch.tensor([0, *batch.kv_lens]).cumsum(0).to(torch.int32)
    k, v = torch.cat(batch.key), torch.cat(batch.value)
    out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    starts = batch.meta.query_start_loc
    ops.attention(q, k, v, starts, kv_start, out=out, lse=lse, softmax_scale=0.3, **VARIANTS[variant])
    expected, expected_lse = attention_oracle(q, batch, softmax_scale=0.3, **VARIANTS[variant])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_contiguous_attention_equals_torch() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(11, 4, 8, dtype=torch.float64, generator=g) for _ in range(3))
    loc = torch.tensor([0, 11], dtype=torch.int32)
    out = torch.empty_like(q)
    ops.attention(q, k, v, loc, loc, out=out, softmax_scale=8**-0.5)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_merging_two_parts_equals_the_whole() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(n, 3, 8, dtype=torch.float64, generator=g) for n in (4, 10, 10))

    def part(first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(q), torch.empty(4, 3, dtype=torch.float64)
        starts, keys = torch.tensor([0, 4]), torch.tensor([0, end - first])
        span = slice(first, end)
        ops.attention(q, k[span], v[span], starts, keys, out=out, lse=lse, causal=False, softmax_scale=0.5)
        return out, lse

    whole, whole_lse = part(0, 10)
    out, lse = torch.empty_like(q), torch.empty(4, 3, dtype=torch.float64)
    ops.merge_attention(*part(0, 7), *part(7, 10), out=out, lse=lse)
    torch.testing.assert_close(out, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


def test_merging_an_empty_part_changes_nothing() -> None:
    a, lse_a = torch.randn(3, 2, 4), torch.randn(3, 2)
    nothing, lse_nothing = torch.full((3, 2, 4), math.nan), torch.full((3, 2), -math.inf)
    out, lse = torch.empty_like(a), torch.empty_like(lse_a)
    ops.merge_attention(a, lse_a, nothing, lse_nothing, out=out, lse=lse)
    assert torch.equal(out, a)
    assert torch.equal(lse, lse_a)
    ops.merge_attention(nothing, lse_nothing, nothing, lse_nothing, out=out, lse=lse)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, lse_nothing)


def test_mla_equals_attention_over_its_latents() -> None:
    rank, rope, heads = 8, 4, 3
    spec = KVCacheSpec(1, rank + rope, 0, torch.float64, 4)
    generator = torch.Generator().manual_seed(3)
    batch = make_ragged(QUERIES, LENGTHS, spec, KVLayout.MLA, generator=generator)
    q = torch.randn(batch.meta.num_tokens, heads, rank + rope, dtype=torch.float64, generator=generator)
    out = torch.empty(batch.meta.num_tokens, heads, rank, dtype=torch.float64)
    lse = torch.empty(batch.meta.num_tokens, heads, dtype=torch.float64)
    plan = StepPlan(batch.meta)
    ops.mla_attention(q[..., :rank], q[..., rank:], batch.kv, plan, out=out, lse=lse, softmax_scale=0.2)
    latent_values = [key[..., :rank] for key in batch.key]
    as_kv = Ragged(batch.meta, batch.kv, batch.query_lens, batch.kv_lens, batch.key, latent_values)
    expected, expected_lse = attention_oracle(q, as_kv, softmax_scale=0.2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-12, atol=1e-12)
