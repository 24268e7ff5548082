"""The reference's rows, products, cache, routing and quantisation against formulas written out apart."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from octavo.core.backend import (
    ActivationKind,
    Epilogue,
    KVCacheSpec,
    KVLayout,
    NormPrologue,
    PlainWeight,
    QuantFormat,
    QuantizedTensor,
    QuantScheme,
    ReferenceOps,
    SingleRank,
    WeightSpec,
)
from octavo.core.backend.reference.numeric import widened
from octavo.core.base.errors import UnsupportedOp
from tests.backend.ragged import make_cache

ops = ReferenceOps(torch.device("cpu"))
F64 = torch.float64


def rand(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(data_NK: torch.Tensor, **kw) -> PlainWeight:
    w = ops.prepare_weight(WeightSpec(*data_NK.shape, data_NK.dtype, **kw))
    half = data_NK.shape[0] // 2
    w.place(data_NK[:half], 0)
    w.place(data_NK[half:], half)
    return w


# -- rows -------------------------------------------------------------------------------------------------------


def test_rms_norm_over_tokens_and_heads() -> None:
    for shape in ((5, 8), (5, 3, 8), (0, 8)):
        x, w = rand(*shape), rand(8, seed=1)
        out = torch.empty_like(x)
        ops.rms_norm(x, w, out=out, eps=1e-3)
        expected = torch.stack([r / math.sqrt(float((r * r).mean()) + 1e-3) * w for r in x.reshape(-1, 8)] or [x[:0]])
        torch.testing.assert_close(out, expected.reshape(shape), rtol=1e-12, atol=1e-12)


def test_rms_norm_with_residual_updates_it_in_place_and_may_write_over_x() -> None:
    x, residual, w = rand(4, 8), rand(4, 8, seed=1), rand(8, seed=2)
    total, expected = x + residual, torch.empty_like(x)
    ops.rms_norm(total, w, out=expected, eps=1e-6)
    ops.rms_norm(x, w, out=x, eps=1e-6, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(x, expected)


def test_rms_norm_of_large_16_bit_values_does_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    out = torch.empty_like(x)
    ops.rms_norm(x, torch.ones(8), out=out, eps=1e-6)
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_turns_pairs(rotary_dim: int, *, interleaved: bool) -> None:
    T, D, half = 6, 8, rotary_dim // 2
    q, k, positions = rand(T, 3, D), rand(T, 2, D, seed=1), torch.tensor([0, 3, 1, 7, 7, 2])
    angles = torch.arange(8, dtype=F64)[:, None] * torch.tensor([0.5**i for i in range(half)], dtype=F64)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    ops.rotary(q, k, positions, cos_sin, out_q=out_q, out_k=out_k, interleaved=interleaved)
    for x, out in ((q, out_q), (k, out_k)):
        expected = x.clone()
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            turn = torch.exp(1j * angles[positions, i])[:, None]
            pair = torch.complex(x[..., a], x[..., b]) * turn
            expected[..., a], expected[..., b] = pair.real, pair.imag
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ops.rotary(q, k, positions, cos_sin, out_q=q, out_k=k, interleaved=interleaved)
    assert torch.equal(q, out_q)
    assert torch.equal(k, out_k)


def test_layer_norm_over_tokens_and_heads() -> None:
    for shape in ((5, 8), (5, 3, 8), (4, 1), (0, 8)):
        x, w, bias = 3 + rand(*shape), rand(shape[-1], seed=1), rand(shape[-1], seed=2)
        for add in (None, bias):
            out = torch.empty_like(x)
            ops.layer_norm(x, w, out=out, eps=1e-3, bias_M=add)
            for row, got in zip(x.reshape(-1, shape[-1]), out.reshape(-1, shape[-1]), strict=True):
                mean = float(row.sum()) / len(row)
                spread = math.sqrt(sum((float(v) - mean) ** 2 for v in row) / len(row) + 1e-3)
                expected = (row - mean) / spread * w + (0 if add is None else add)
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_layer_norm_with_residual_updates_it_in_place_and_may_write_over_x() -> None:
    x, residual, w, bias = rand(4, 8), rand(4, 8, seed=1), rand(8, seed=2), rand(8, seed=3)
    total, expected = x + residual, torch.empty_like(x)
    ops.layer_norm(total, w, out=expected, eps=1e-6, bias_M=bias)
    ops.layer_norm(x, w, out=x, eps=1e-6, bias_M=bias, residual=residual)
    assert torch.equal(residual, total)
    assert torch.equal(x, expected)


def test_layer_norm_of_16_bit_rows_far_from_zero_keeps_what_they_vary_by() -> None:
    x = (1024 + torch.arange(8.0)).to(torch.bfloat16)[None]  # 1024 or 1032: bf16 has nothing between
    out = torch.empty(1, 8)
    ops.layer_norm(x, torch.ones(8), out=out, eps=1e-6)
    wide = x.double()
    expected = (wide - wide.mean()) / (wide.var(correction=0) + 1e-6).sqrt()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("gate", "function"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("relu", lambda x: max(x, 0.0)),
    ],
)
def test_an_activation_alone_and_of_a_pair(gate, function) -> None:
    x = 3 * rand(4, 10)
    activated = torch.tensor([[function(float(v)) for v in row] for row in x], dtype=F64)
    if gate != "relu":
        out = torch.empty(4, 5, dtype=F64)
        ops.act_mul(x, out=out, gate=gate)
        torch.testing.assert_close(out, activated[:, :5] * x[:, 5:], rtol=1e-12, atol=1e-12)
    ops.activation(x, out=x, kind=gate)
    torch.testing.assert_close(x, activated, rtol=1e-12, atol=1e-12)


def test_activations_keep_nan() -> None:
    x = torch.tensor([[math.nan, 1.0]])
    for kind in get_args(ActivationKind):
        out = torch.empty_like(x)
        ops.activation(x, out=out, kind=kind)
        assert out.isnan().tolist() == [[True, False]]


def test_the_clamped_gate_limits_the_gate_from_above_and_up_on_both_sides() -> None:
    gate = torch.tensor([-20.0, -1.0, 6.5, 7.0, 9.0, 1e4], dtype=F64)
    up = torch.tensor([3.0, -9.0, 8.0, -7.0, 0.5, -1e4], dtype=F64)
    out = torch.empty(1, 6, dtype=F64)
    ops.act_mul(torch.cat((gate, up))[None], out=out, gate="swiglu_clamped")
    expected = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        g, u = min(g, 7.0), min(max(u, -7.0), 7.0)
        expected.append((u + 1) * g / (1 + math.exp(-1.702 * g)))
    torch.testing.assert_close(out[0], torch.tensor(expected, dtype=F64), rtol=1e-12, atol=1e-12)


def test_embed_scales_rows() -> None:
    table = rand(7, 4, dtype=torch.bfloat16)
    out = torch.empty(3, 4)
    ops.embed(torch.tensor([6, 0, 6]), weight(table, embedding=True), out=out, scale=0.5)
    assert torch.equal(out, table[[6, 0, 6]].float() * 0.5)


def test_all_reduce_norm_of_one_rank_is_rms_norm_with_residual() -> None:
    x, residual, w = rand(4, 8), rand(4, 8, seed=1), rand(8, seed=2)
    total, out, expected = x + residual, torch.empty_like(x), torch.empty_like(x)
    ops.rms_norm(total, w, out=expected, eps=1e-6)
    ops.all_reduce_norm(x, SingleRank(), w, out=out, residual=residual, eps=1e-6)
    assert torch.equal(out, expected)
    assert torch.equal(residual, total)


# -- products ---------------------------------------------------------------------------------------------------


def test_gemm_applies_its_epilogue_in_order() -> None:
    x, w, bias, residual = rand(5, 6), rand(8, 6, seed=1), rand(8, seed=2), rand(5, 4, seed=3)
    out = residual.clone()
    epilogue = Epilogue(bias_N=bias, gate="silu", residual=out)
    ops.gemm(x, weight(w, gated=True), out=out, prologue=NormPrologue(torch.ones(6), 1e-6), epilogue=epilogue)
    normed = torch.empty_like(x)
    ops.rms_norm(x, torch.ones(6), out=normed, eps=1e-6)
    y = torch.stack([torch.stack([(normed[t] * w[n]).sum() for n in range(8)]) for t in range(5)]) + bias
    expected = y[:, :4] * torch.sigmoid(y[:, :4]) * y[:, 4:] + residual
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_gemm_argmax_takes_the_lowest_id_of_a_tie() -> None:
    w = torch.tensor([[0.0], [1.0], [1.0], [-1.0]])
    out = torch.empty(2, dtype=torch.int64)
    ops.gemm(torch.tensor([[1.0], [-1.0]]), weight(w), out=out, epilogue=Epilogue(argmax=True))
    assert out.tolist() == [1, 3]


def test_gemm_of_16_bit_inputs_is_accumulated_in_fp32() -> None:
    x = torch.ones(1, 4096, dtype=torch.bfloat16)
    out = torch.empty(1, 2, dtype=torch.float32)
    ops.gemm(x, weight(torch.ones(2, 4096, dtype=torch.bfloat16)), out=out)
    assert out.tolist() == [[4096.0, 4096.0]]


def test_gemm_with_quantised_weight_and_activations() -> None:
    codes = torch.tensor([[1, -2, 3, 4], [5, 6, -7, 8]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[1, 0], [-1, 2]], dtype=torch.int8)
    scheme = QuantScheme(QuantFormat.INT8, group_size=2, symmetric=False, activation=QuantFormat.INT8)
    w = ops.prepare_weight(WeightSpec(2, 4, torch.float32, scheme))
    w.place(QuantizedTensor(scheme, codes, scales, zeros), 0)
    plain = torch.tensor([[0.0, -1.5, 6.0, 8.0], [6.0, 7.0, -2.25, 1.5]])
    assert torch.equal(w.dense(), plain)
    x = torch.tensor([[127.0, -3.2, 0.4, 2.5]])
    out = torch.empty(1, 2)
    ops.gemm(x, w, out=out)
    assert torch.equal(out, torch.tensor([[127.0, -3.0, 0.0, 2.0]]) @ plain.T)


def test_a_part_outside_its_weight_is_refused() -> None:
    w = ops.prepare_weight(WeightSpec(4, 3, torch.float32))
    for part, row in ((torch.zeros(2, 3), 3), (torch.zeros(2, 2), 0), (torch.zeros(1, 3), -1)):
        with pytest.raises(ValueError, match="does not lie inside"):
            w.place(part, row)


def test_grouped_gemm_with_empty_and_missing_segments() -> None:
    x, data = rand(6, 4), [rand(6, 4, seed=s) for s in range(1, 5)]
    out = torch.full((6, 3), math.nan, dtype=F64)
    starts = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32)
    ops.grouped_gemm(x, [weight(w, gated=True) for w in data], starts, out=out, gate="silu")
    for e, (first, end) in enumerate([(0, 2), (2, 2), (2, 5), (5, 6)]):
        y = x[first:end] @ data[e].T
        torch.testing.assert_close(out[first:end], y[:, :3] * torch.sigmoid(y[:, :3]) * y[:, 3:])


def test_lora_adds_each_rows_adapter_and_leaves_the_others() -> None:
    x, a, b = rand(5, 6), rand(3, 3, 6, seed=1), rand(3, 4, 3, seed=3)
    a[0, 2:], b[0, :, 2:] = 0, 0  # rank 2 in slots of 3
    a[2], b[2] = 0, 0  # no adapter
    out = rand(5, 4, seed=5)
    before = out.clone()
    adapters, scales = torch.tensor([1, -1, 0, 1, 2], dtype=torch.int32), torch.tensor([0.5, 2.0, 9.0])
    ops.lora_gemm(x, a, b, scales, adapters, out=out)
    for t, i in enumerate(adapters.tolist()):
        rank = (2, 3, 0)[i]
        expected = before[t] if i < 0 else before[t] + float(scales[i]) * (b[i, :, :rank] @ (a[i, :rank] @ x[t]))
        torch.testing.assert_close(out[t], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(out[[1, 4]], before[[1, 4]])


@pytest.mark.parametrize(("fmt", "limit"), [(QuantFormat.INT8, 127), (QuantFormat.FP8_E4M3FN, 448)])
@pytest.mark.parametrize("group", [0, -1, 2])
def test_quantize_rounds_to_the_nearest_code(fmt: QuantFormat, limit: int, group: int) -> None:
    x = rand(3, 4, dtype=torch.float32)
    x[1] = 0
    shape = {0: (3, 1), -1: (1, 1), 2: (3, 2)}[group]
    codes = torch.empty(3, 4, dtype=torch.int8 if fmt is QuantFormat.INT8 else torch.float8_e4m3fn)
    scales = torch.full(shape, math.nan)
    ops.quantize(x, QuantScheme(fmt, group), out=codes, scales=scales)
    per_element = scales.repeat_interleave(4 // shape[1], 1).expand(3, 4)
    error = (codes.float() * per_element - x).abs()
    step = per_element * (1 if fmt is QuantFormat.INT8 else limit / 16)
    assert (error <= step / 2 * 1.0001).all()
    assert float(codes.float().abs().max()) == limit


def test_quantize_ties_to_even_and_refuses_zero_points() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, -2.5]])
    codes, scales = torch.empty(1, 4, dtype=torch.int8), torch.empty(1, 1)
    ops.quantize(x, QuantScheme(QuantFormat.INT8), out=codes, scales=scales)
    assert codes.tolist() == [[127, 0, 2, -2]]
    with pytest.raises(UnsupportedOp, match="symmetric"):
        ops.quantize(x, QuantScheme(QuantFormat.INT8, symmetric=False), out=codes, scales=scales)


# -- the KV cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [KVLayout.NHD, KVLayout.HND, KVLayout.HDN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_write_kv_writes_its_slots_and_nothing_else(layout: KVLayout, dtype: torch.dtype) -> None:
    kv = make_cache(4, KVCacheSpec(2, 3, 5, dtype, 4), layout, fill=9.0)
    assert kv.key_NSKD is not None
    assert kv.value_NSKD is not None
    k, v = rand(6, 2, 3, dtype=torch.float32), rand(6, 2, 5, dtype=torch.float32, seed=1)
    slots = torch.tensor([13, -1, 0, 7, 2])  # and one more row of k than there are slots
    ops.write_kv(k, v, kv, slots, k_scale=torch.tensor([0.5, 0.25]), v_scale=torch.tensor(2.0))
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, 4)
            expected = (k[row] / torch.tensor([[0.5], [0.25]])).to(dtype)
            assert torch.equal(kv.key_NSKD[block, offset].float(), expected.float())
            assert torch.equal(kv.value_NSKD[block, offset].float(), (v[row] / 2).to(dtype).float())
            kv.key_NSKD[block, offset] = 9.0
            kv.value_NSKD[block, offset] = 9.0
    assert (kv.key_NSKD.float() == 9).all()
    assert (kv.value_NSKD.float() == 9).all()


def test_write_kv_saturates_8_bit_floats() -> None:
    kv = make_cache(1, KVCacheSpec(1, 2, 2, torch.float8_e4m3fn, 2), KVLayout.NHD)
    x = torch.tensor([[[1e6, -1e6]]])
    ops.write_kv(x, x, kv, torch.tensor([1]))
    assert kv.key_NSKD is not None
    assert kv.key_NSKD[0, 1].float().tolist() == [[448.0, -448.0]]


def test_write_kv_of_integers_rounds_to_even_saturates_symmetrically_and_reads_back() -> None:
    kv = make_cache(2, KVCacheSpec(2, 8, 8, torch.int8, 2), KVLayout.NHD, fill=0)
    scale = torch.tensor([0.5, 2.0])
    codes_D = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0, 126.4])
    k_TKD = (codes_D * scale[:, None])[None]
    ops.write_kv(k_TKD, -k_TKD, kv, torch.tensor([3]), k_scale=scale, v_scale=scale)
    wanted = [0, 2, 2, 0, -2, 127, -127, 126]
    assert kv.key_NSKD is not None
    assert kv.value_NSKD is not None
    assert kv.key_NSKD[1, 1].tolist() == [wanted, wanted]
    assert kv.value_NSKD[1, 1].tolist() == [[-code for code in wanted]] * 2


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.int8])
def test_every_code_is_widened_to_its_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).view(16, 16)
    for x in (codes, codes.t()):
        assert torch.equal(widened(x, torch.float32).nan_to_num(1e9), x.to(torch.float32).nan_to_num(1e9))


def test_slots_beyond_32_bits_of_bytes() -> None:
    block_bytes = 2**22
    blocks = 2**31 // block_bytes + 2
    spec = KVCacheSpec(1, 256, 256, torch.float32, block_bytes // 2048)
    kv = make_lazy_cache(blocks, spec)
    assert kv.key_NSKD is not None
    slot = (blocks - 1) * spec.block_size + spec.block_size - 1
    x = rand(1, 1, 256, dtype=torch.float32)
    ops.write_kv(x, -x, kv, torch.tensor([slot]))
    assert torch.equal(kv.key_NSKD[blocks - 1, spec.block_size - 1], x[0])


def make_lazy_cache(blocks: int, spec: KVCacheSpec):
    from octavo.core.backend import KVPool, torch_kv_view

    storage = torch.empty(blocks * spec.block_bytes, dtype=torch.uint8)  # the system maps only what is touched
    return torch_kv_view(KVPool(blocks, spec.block_bytes, storage), spec, KVLayout.HND)


def test_rope_write_kv_is_rotary_then_write() -> None:
    kv = make_cache(3, KVCacheSpec(2, 8, 8, torch.float32, 4), KVLayout.HND, fill=0)
    other = make_cache(3, KVCacheSpec(2, 8, 8, torch.float32, 4), KVLayout.HND, fill=0)
    q, k, v = (rand(4, h, 8, dtype=torch.bfloat16, seed=h) for h in (4, 2, 3))
    v = v[:, :2]
    positions, slots = torch.tensor([3, 4, 5, 0]), torch.tensor([7, 8, -1, 0])
    cos_sin = rand(6, 8, dtype=torch.float32, seed=9)
    before, out_q, turned_q, turned_k = k.clone(), torch.empty_like(q), torch.empty_like(q), torch.empty_like(k)
    ops.rope_write_kv(q, k, v, positions, cos_sin, kv, slots, out_q=out_q)
    ops.rotary(q, k, positions, cos_sin, out_q=turned_q, out_k=turned_k)
    ops.write_kv(turned_k, v, other, slots)
    assert torch.equal(out_q, turned_q)
    assert torch.equal(k, before)
    assert torch.equal(kv.storage, other.storage)


def test_blocks_are_copied_in_order_gathered_and_scattered() -> None:
    spec = KVCacheSpec(2, 3, 5, torch.float32, 4)
    kv = make_cache(4, spec, KVLayout.HND, fill=0)
    assert kv.key_NSKD is not None
    assert kv.value_NSKD is not None
    k, v = rand(2, 4, 2, 3, dtype=torch.float32), rand(2, 4, 2, 5, dtype=torch.float32, seed=1)
    ops.scatter_blocks(kv, torch.tensor([3, 1], dtype=torch.int32), k, v)
    ops.copy_blocks(kv, torch.tensor([[3, 0], [0, 2]]))  # the second pair reads what the first wrote
    out_k, out_v = torch.empty(3, 4, 2, 3), torch.empty(3, 4, 2, 5)
    ops.gather_blocks(kv, torch.tensor([2, 1, 0]), out_k=out_k, out_v=out_v)
    assert torch.equal(out_k, k[[0, 1, 0]])
    assert torch.equal(out_v, v[[0, 1, 0]])


def test_write_mla_puts_latent_and_rotary_key_side_by_side() -> None:
    kv = make_cache(2, KVCacheSpec(1, 6, 0, torch.float32, 2), KVLayout.MLA, fill=0)
    latent, rope = rand(2, 4, dtype=torch.float32), rand(2, 2, dtype=torch.float32, seed=1)
    ops.write_mla(latent, rope, kv, torch.tensor([-1, 3]))
    assert kv.key_NSKD is not None
    assert torch.equal(kv.key_NSKD[1, 1, 0], torch.cat((latent[1], rope[1])))
    assert (kv.key_NSKD[0] == 0).all()


# -- routing ----------------------------------------------------------------------------------------------------


def route(logits: torch.Tensor, top_k: int, **kw) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(logits.shape[0], top_k)
    ids = torch.empty(logits.shape[0], top_k, dtype=torch.int32)
    ops.moe_route(logits, top_k=top_k, out_weights=weights, out_ids=ids, **kw)
    return weights, ids


def test_route_orders_experts_and_breaks_ties_low() -> None:
    weights, ids = route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 3)
    assert ids.tolist() == [[1, 3, 2]]
    chosen = torch.tensor([2.0, 2.0, 1.0]).softmax(0)
    torch.testing.assert_close(weights[0], chosen)
    weights, _ = route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 3, renormalize=False, scale=2.5)
    torch.testing.assert_close(weights[0], 2.5 * torch.tensor([0.0, 2.0, 1.0, 2.0]).softmax(0)[[1, 3, 2]])


def test_route_bias_chooses_but_does_not_weigh() -> None:
    logits, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([10.0, 0.0, 0.0])
    weights, ids = route(logits, 2, scoring="sigmoid", bias_E=bias)
    assert ids.tolist() == [[0, 2]]
    scores = logits[0, [0, 2]].sigmoid()
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_route_limits_groups() -> None:
    logits = torch.tensor([[9.0, 0.0, 5.0, 5.5]])
    assert route(logits, 2, num_groups=2, top_groups=1)[1].tolist() == [[0, 1]]  # the best expert decides
    biased = route(logits, 2, scoring="sigmoid", bias_E=torch.zeros(4), num_groups=2, top_groups=1)
    assert biased[1].tolist() == [[3, 2]]  # with a bias, the best two together


def test_route_of_nan_and_of_nothing() -> None:
    weights, ids = route(torch.tensor([[0.0, 1.0, 2.0], [0.0, math.nan, 2.0]]), 2)
    assert ids.tolist() == [[2, 1], [0, 1]]
    assert weights[0].isfinite().all()
    assert weights[1].isnan().all()
    assert route(torch.empty(0, 4), 2)[1].shape == (0, 2)


# -- the way to the experts and back ----------------------------------------------------------------------------


def permute(
    ids: list[list[int]], first: int, experts: int, dtype: torch.dtype = torch.int64
) -> tuple[list, list, list]:
    chosen = torch.tensor(ids, dtype=dtype)
    rows, places = torch.full((chosen.numel(),), -9), torch.full(chosen.shape, -9)
    start = torch.full((experts + 1,), -9, dtype=torch.int32)
    ops.moe_permute(chosen, first_expert=first, out_rows=rows, out_places=places, segment_start=start)
    return rows.tolist(), places.tolist(), start.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_permute_sorts_pairs_by_expert_in_the_order_they_came(dtype: torch.dtype) -> None:
    rows, places, start = permute([[2, 0], [0, 2], [2, 1]], 0, 4, dtype)
    assert rows == [0, 1, 2, 0, 1, 2]
    assert places == [[3, 0], [1, 4], [5, 2]]
    assert start == [0, 2, 3, 6, 6]


def test_permute_leaves_out_experts_that_are_elsewhere() -> None:
    rows, places, start = permute([[5, 3], [2, 7], [-1, 4]], 3, 2)
    assert rows == [0, 2, 0, 0, 0, 0]
    assert places == [[-1, 0], [-1, -1], [-1, 1]]
    assert start == [0, 1, 2]
    assert permute([[9, 9]], 0, 2) == ([0, 0], [[-1, -1]], [0, 0, 0])


def test_combine_adds_in_order_and_skips_what_is_elsewhere() -> None:
    y = torch.cat((rand(3, 4), torch.full((1, 4), math.nan, dtype=F64)))  # a row that no place names
    places, weights = torch.tensor([[2, 0], [-1, 1], [-1, -1]]), torch.tensor([[0.5, 2.0], [math.nan, 3.0], [1.0, 1.0]])
    for residual in (None, rand(3, 4, seed=1)):
        out = torch.empty(3, 4, dtype=F64) if residual is None else residual
        base = torch.zeros(3, 4, dtype=F64) if residual is None else residual.clone()
        ops.moe_combine(y, places, weights, out=out, residual=residual)
        expected = base + torch.stack((y[2] * 0.5 + y[0] * 2, y[1] * 3, torch.zeros(4, dtype=F64)))
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_combine_of_16_bits_rounds_once() -> None:
    y = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    residual = torch.full((1, 1), -256.0, dtype=torch.bfloat16)
    ops.moe_combine(y, torch.tensor([[1, 1, 0]]), torch.tensor([[0.5, 0.25, 1.0]]), out=out, residual=residual)
    assert out.tolist() == [[0.75]]


def test_there_and_back_is_the_weighted_sum_of_the_experts() -> None:
    T, K, E = 7, 3, 5
    x, w = rand(T, 4), [rand(6, 4, seed=s) for s in range(E)]
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:K] for t in range(T)])
    scale = rand(T, K, seed=9)
    rows, places, start = (
        torch.empty(T * K, dtype=torch.int64),
        torch.empty_like(ids),
        torch.empty(4, dtype=torch.int32),
    )
    ops.moe_permute(ids, first_expert=2, out_rows=rows, out_places=places, segment_start=start)
    y, out = torch.full((T * K, 6), math.nan, dtype=F64), torch.empty(T, 6, dtype=F64)
    ops.grouped_gemm(x[rows], [weight(w[e]) for e in (2, 3, 4)], start, out=y)
    ops.moe_combine(y, places, scale, out=out)
    for t in range(T):
        here = [(k, e) for k, e in enumerate(ids[t].tolist()) if e >= 2]
        expected = sum((float(scale[t, k]) * (w[e] @ x[t]) for k, e in here), torch.zeros(6, dtype=F64))
        torch.testing.assert_close(out[t], expected, rtol=1e-12, atol=1e-12)
