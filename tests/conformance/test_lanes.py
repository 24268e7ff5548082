"""The lanes find what they are for, and pass what is honest."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.harness.host import CAPABILITIES
from octavo.conformance.lanes import codes, probe
from octavo.conformance.lanes.distribution import fits, valid
from octavo.conformance.lanes.exact import exact, power_of_two_scales, product
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import rounding_bound
from octavo.conformance.oracle import attention as oracle
from octavo.conformance.oracle import quantise
from octavo.core.backend import QuantFormat


def draw(name: str = "t") -> Draw:
    return Draw(1, name, "gemm", Facts.of(CAPABILITIES))


@pytest.mark.parametrize("k", [1, 2, 3, 16, 17, 100, 4099])
def test_exact_products_climb_stay_in_budget_and_end_small(k: int) -> None:
    drawn = product(draw(), 7, 9, k, limit=64)
    terms = drawn.x_MK.double()[:, None] * drawn.w_NK.double()[None]
    assert float(terms.abs().sum(-1).max()) <= 2**24
    assert float(terms.sum(-1).abs().max()) <= 64
    assert bool(terms.sum(-1).any())
    assert float(max(drawn.x_MK.abs().max(), drawn.w_NK.abs().max())) <= 2**8
    if k >= 16:
        assert float(terms.cumsum(-1).abs().amax(-1).min()) > 2**13
    assert bool((drawn.x_MK[:, -1:] * drawn.w_NK[:, -1]).all()), "a dropped last column would not show"


def test_exact_compares_bits_but_for_the_sign_of_zero() -> None:
    a = torch.tensor([0.0, 1.0, math.nan])
    assert exact("o", a, torch.tensor([-0.0, 1.0, math.nan])).ok
    found = exact("o", a, torch.tensor([0.0, 1.0 + 2**-20, math.nan]))
    assert (found.ok, found.index) == (False, (1,))
    assert not exact("o", a[:2], a).ok


def test_neighbouring_scales_differ() -> None:
    scales = power_of_two_scales(draw(), 4, 6, spread=3)
    assert bool((scales[:, 1:] != scales[:, :-1]).all())
    assert bool((scales.log2() == scales.log2().round()).all())


def attended(length: int, heads: int = 4, dim: int = 64, dtype: torch.dtype = torch.bfloat16):
    d = draw(f"a{length}")
    q, k, v = (d.normal(n, h, dim, dtype=dtype) for n, h in ((2, heads), (length, 2), (length, 2)))
    return q, k, v, oracle.attend(q, [k], [v], [2], oracle.Rule(dim**-0.5))


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistical_passes_rounding_and_finds_gain_and_a_dropped_token(length: int, dtype: torch.dtype) -> None:
    q, k, v, want = attended(length, dtype=dtype)
    bound = want.out_bound(64, dtype)
    assert statistical("out", want.out.to(dtype), want.out, bound).ok
    assert not statistical("out", (want.out * 1.01).to(dtype), want.out, bound).ok
    rule = oracle.Rule(64**-0.5, causal=False)
    short = oracle.attend(q, [k[:-1]], [v[:-1]], [2], rule)
    assert not statistical("out", short.out.to(dtype), want.out, bound).ok
    assert statistical("lse", want.lse.float(), want.lse, want.lse_bound(64)).ok


def test_statistical_takes_an_infinite_reference_only_for_itself() -> None:
    q = torch.ones(1, 1, 8)
    nothing = oracle.attend(q, [torch.empty(0, 1, 8)], [torch.empty(0, 1, 8)], [1], oracle.Rule(1.0))
    assert float(nothing.lse) == -math.inf
    assert statistical("lse", nothing.lse.float(), nothing.lse, nothing.lse_bound(8)).ok
    assert not statistical("lse", torch.zeros(1, 1), nothing.lse, nothing.lse_bound(8)).ok


def test_rounding_to_subnormals_is_within_what_is_predicted_and_more_is_not() -> None:
    """Near 0 all fp16 results are rounded to multiples of 2^-24, which no share of their size accounts for."""
    want = torch.randn(4096, generator=torch.Generator().manual_seed(4)).double() * 2.0**-22
    bound = rounding_bound(want, dtype=torch.float16)
    honest = statistical("out", want.to(torch.float16), want, bound)
    assert 0.9 < honest.share <= 1
    assert honest.rms is not None
    assert 0.4 < honest.rms < 0.6  # The prediction holds: a half of what is allowed.
    assert honest.ok
    truncated = (want * 2.0**24).trunc() * 2.0**-24
    assert not statistical("out", truncated.to(torch.float16), want, bound).ok


def test_oracle_attention_agrees_with_torch() -> None:
    q, k, v, want = attended(20)
    q_HQD, k_HLD, v_HLD = (x.double().transpose(0, 1) for x in (q, k, v))
    mask = torch.tensor([[True] * 19 + [False], [True] * 20])
    expected = torch.nn.functional.scaled_dot_product_attention(
        q_HQD, k_HLD.repeat_interleave(2, 0), v_HLD.repeat_interleave(2, 0), attn_mask=mask
    )
    torch.testing.assert_close(want.out, expected.transpose(0, 1))


def test_needle_gives_the_value_bit_for_bit_and_the_decoy_when_hidden() -> None:
    d, dim, length = draw("needle"), 32, 2000
    codes = probe.needle_codes(d, length, dim, [0, 1000, 1999], {1999: 3})
    others = [j for j in range(length) if j not in (1000,)]
    assert float((codes[others] @ codes[1000]).max()) <= dim / 4
    v = probe.needle_values(d, length, 1, dim, torch.bfloat16)
    for target, winner, keys in ((1000, 1000, length), (0, 0, length), (1999, 3, length - 1)):
        q = probe.needle_query(codes, target, dim**-0.5, has_decoy=target == 1999)
        got = oracle.attend(q[None, None], [codes[:keys, None]], [v[:keys]], [1], oracle.Rule(dim**-0.5)).out
        assert probe.found("out", got.to(torch.bfloat16)[0], v[winner]).ok
        assert not probe.found("out", got.to(torch.bfloat16)[0], v[winner - 1]).ok


@pytest.mark.parametrize("length", [16, 500])
def test_visible_set_finds_one_key_too_many_or_too_few(length: int) -> None:
    codes = draw("visible").signs(length, 8, 64)
    seen = torch.ones(length, dtype=torch.bool)
    seen[-1] = False
    mean = codes[seen].mean(dim=0).to(torch.bfloat16)
    assert probe.visible_set("out", mean, codes, seen).ok
    assert not probe.visible_set("out", codes.mean(dim=0).to(torch.bfloat16), codes, seen).ok
    less = seen.clone()
    less[0] = False
    found = probe.visible_set("out", codes[less].mean(dim=0).to(torch.bfloat16), codes, seen)
    assert (found.ok, found.index) == (False, (0,))


def test_distribution_finds_tokens_that_can_not_be_and_wrong_frequencies() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    tokens = torch.multinomial(p, 4000, replacement=True, generator=torch.Generator().manual_seed(1))
    assert fits("out", tokens, p).ok
    assert not fits("out", tokens, torch.tensor([0.45, 0.35, 0.15, 0.05, 0.0])).ok
    possible = (p > 0).expand(4000, -1)
    assert valid("out", tokens, possible).ok
    tokens[7] = 4
    assert valid("out", tokens, possible).index == (7,)


@pytest.mark.parametrize(("dtype", "is_fnuz"), [(torch.float8_e4m3fn, False), (torch.float8_e4m3fnuz, True)])
def test_fp8_codes_and_rounding_agree_with_torch_inside_the_range(dtype: torch.dtype, is_fnuz: bool) -> None:
    table = quantise.fp8_values(is_fnuz=is_fnuz)
    bits = torch.arange(256, dtype=torch.uint8).view(dtype)
    torch.testing.assert_close(table, bits.double(), equal_nan=True)
    x = torch.linspace(-230, 230, 4001)
    assert torch.equal(quantise.round_to_fp8(x, is_fnuz=is_fnuz), x.to(dtype).double())
    assert float(quantise.round_to_fp8(torch.tensor([1e6]), is_fnuz=is_fnuz)) == (240.0 if is_fnuz else 448.0)


@pytest.mark.parametrize("quant_format", [QuantFormat.INT8, QuantFormat.FP8_E4M3FN, QuantFormat.FP8_E4M3FNUZ])
def test_a_code_may_be_one_off_but_not_two_and_not_many_may(quant_format: QuantFormat) -> None:
    want, scales = quantise.quantise(draw("codes").normal(16, 64), quant_format)
    ladder = torch.unique(want)

    def moved(count: int, steps: int) -> torch.Tensor:
        got = want.clone().flatten()
        places = torch.searchsorted(ladder, got[:count])
        got[:count] = ladder[torch.where(places >= len(ladder) // 2, places - steps, places + steps)]
        return got.view_as(want)

    assert codes.near("out", want, want, quant_format).ok
    assert codes.near("out", moved(1, 1), want, quant_format).ok
    assert not codes.near("out", moved(1, 8), want, quant_format).ok
    assert not codes.near("out", moved(200, 1), want, quant_format).ok
    assert codes.scales("scales", scales.float(), scales).ok
    assert not codes.scales("scales", (scales * (1 + 2**-20)).float(), scales).ok
