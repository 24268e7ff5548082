"""The oracle and the reference ops share no code: where both are right they agree."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from octavo.conformance.oracle import attention, moe, quantise, rows, sampling
from octavo.core.backend import ACTIVATION_FORMATS, ActivationKind, Gate, QuantFormat, QuantScheme, ReferenceOps

ops = ReferenceOps(torch.device("cpu"))
F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("gate", get_args(Gate))
def test_gates(gate: Gate) -> None:
    x, out = rand(9, 12) * 4, torch.empty(9, 6, dtype=F64)
    ops.act_mul(x, out=out, gate=gate)
    torch.testing.assert_close(rows.act_mul(x, gate).out, out)


@pytest.mark.parametrize("kind", get_args(ActivationKind))
def test_activations(kind: ActivationKind) -> None:
    x, out = rand(9, 12) * 4, torch.empty(9, 12, dtype=F64)
    ops.activation(x, out=out, kind=kind)
    torch.testing.assert_close(rows.activation(x, kind), out)


def test_layer_norm() -> None:
    x, weight, bias, out = rand(5, 3, 8) + 2, rand(8), rand(8), torch.empty(5, 3, 8, dtype=F64)
    for add in (None, bias):
        ops.layer_norm(x, weight, out=out, eps=1e-5, bias_M=add)
        torch.testing.assert_close(rows.layer_norm(x, weight, add, 1e-5).out, out)


def test_to_the_experts_and_back() -> None:
    ids = torch.tensor([[5, 3], [2, 7], [-1, 3], [4, 4]])
    got, start = (torch.empty(8, dtype=torch.int64), torch.empty_like(ids)), torch.empty(3, dtype=torch.int32)
    ops.moe_permute(ids, first_expert=3, out_rows=got[0], out_places=got[1], segment_start=start)
    want = moe.permute(ids, first_expert=3, experts=2)
    for mine, other in zip((*got, start), (want.rows, want.places, want.segment_start), strict=True):
        assert torch.equal(mine, other)
    y, weights, residual, out = rand(8, 6), rand(4, 2), rand(4, 6), torch.empty(4, 6, dtype=F64)
    for base in (None, residual):
        ops.moe_combine(y, want.places, weights, out=out, residual=base)
        torch.testing.assert_close(moe.combine(y, want.places, weights, base).out, out)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotary(is_interleaved: bool) -> None:
    q, k, table, positions = rand(5, 4, 8), rand(5, 2, 8), rand(16, 6), torch.tensor([3, 0, 15, 7, 7])
    out_q, out_k = torch.empty_like(q), torch.empty_like(k)
    ops.rotary(q, k, positions, table, out_q=out_q, out_k=out_k, interleaved=is_interleaved)
    torch.testing.assert_close(rows.rotary(q, positions, table, is_interleaved=is_interleaved)[0], out_q)
    torch.testing.assert_close(rows.rotary(k, positions, table, is_interleaved=is_interleaved)[0], out_k)


RULES = [
    {"causal": causal, "window": window, "softcap": softcap, "sinks_H": sinks}
    for causal, window, softcap, sinks in itertools.product((True, False), (None, 1, 3), (None, 0.5), (None, rand(4)))
]


@pytest.mark.parametrize("rule", RULES)
def test_attention_with_more_queries_than_keys_and_empty_requests(rule: dict) -> None:
    query_lens, key_lens = [3, 0, 5, 2, 1], [7, 4, 3, 0, 1]
    q, k, v = rand(11, 4, 6), rand(15, 2, 6, seed=1), rand(15, 2, 5, seed=2)
    starts, key_starts = (torch.tensor([0, *lens]).cumsum(0) for lens in (query_lens, key_lens))
    out, lse = torch.empty(11, 4, 5, dtype=F64), torch.empty(11, 4, dtype=F64)
    ops.attention(q, k, v, starts, key_starts, out=out, lse=lse, softmax_scale=0.4, **rule)
    want = attention.attend(q, k.split(key_lens), v.split(key_lens), query_lens, attention.Rule(0.4, **rule))
    torch.testing.assert_close(want.out, out)
    torch.testing.assert_close(want.lse, lse)


def test_merge_with_empty_parts() -> None:
    a, b, lse_a, lse_b = rand(4, 2, 3), rand(4, 2, 3, seed=1), rand(4, 2), rand(4, 2, seed=3)
    lse_a[0], lse_b[1], a[0] = -torch.inf, -torch.inf, torch.nan
    lse_a[2] = lse_b[2] = -torch.inf
    out, lse = torch.empty_like(a), torch.empty_like(lse_a)
    ops.merge_attention(a, lse_a, b, lse_b, out=out, lse=lse)
    got = attention.merge(a, lse_a, b, lse_b)
    torch.testing.assert_close(got[0], out)
    torch.testing.assert_close(got[1], lse)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
def test_routing(scoring: str, has_bias: bool, groups: tuple[int, int]) -> None:
    logits = rand(20, 16).round(decimals=0)  # ties
    logits[3, 5] = torch.nan
    kwargs = {
        "top_k": 3,
        "scoring": scoring,
        "bias_E": rand(16, seed=9).round(decimals=0) if has_bias else None,
        "num_groups": groups[0],
        "top_groups": groups[1],
        "scale": 2.5,
    }
    weights, ids = torch.empty(20, 3, dtype=F64), torch.empty(20, 3, dtype=torch.int64)
    ops.moe_route(logits, out_weights=weights, out_ids=ids, **kwargs)
    want_weights, want_ids = moe.route(logits, **kwargs)
    assert torch.equal(want_ids, ids)
    torch.testing.assert_close(want_weights, weights, equal_nan=True)


@pytest.mark.parametrize("quant_format", ACTIVATION_FORMATS)
@pytest.mark.parametrize("group_size", [0, -1, 4])
def test_quantisers(quant_format: QuantFormat, group_size: int) -> None:
    x = rand(6, 8).float()
    x[2, :4] = 0
    dtype = getattr(torch, "int8" if "int" in quant_format else quant_format.value.replace("fp8", "float8"))
    codes = torch.empty(6, 8, dtype=dtype)
    shape = {0: (6, 1), -1: (1, 1), 4: (6, 2)}[group_size]
    scales = torch.empty(shape)
    ops.quantize(x, QuantScheme(quant_format, group_size), out=codes, scales=scales)
    want_codes, want_scales = quantise.quantise(x, quant_format, group_size)
    torch.testing.assert_close(want_scales, scales.double(), rtol=2**-23, atol=0)
    assert torch.equal(want_codes, quantise.decode(codes))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.3, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 20, 0.8, 0.05),
        (0, 0, 1, 0),
    ],
)
def test_kept_sets_hold_what_the_reference_draws(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = (rand(50) * 3).float()
    draws = 4000
    out = torch.empty(draws, dtype=torch.int64)
    column = torch.full((draws,), 1.0)
    ops.sample(
        logits.expand(draws, -1),
        column * temperature,
        torch.full((draws,), top_k),
        column * top_p,
        column * min_p,
        torch.linspace(0, 1 - 1e-6, draws),
        out=out,
    )
    kept = sampling.kept(logits, temperature, top_k, top_p, min_p)
    seen = torch.bincount(out, minlength=50) > 0
    assert not bool((seen & ~kept.possible).any())
    assert bool(seen[kept.probability > 2 / draws].all())
    assert float((torch.bincount(out, minlength=50) / draws - kept.probability).abs().max()) < 2 / draws
