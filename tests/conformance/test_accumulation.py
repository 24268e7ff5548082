"""The class of Hopper's products of 8-bit floats, against a model of its tensor cores in float64.

    32 products ─┐                          ┌─ sum of what is left, cut to 14 significant bits
    sum so far ──┴─ aligned to the largest ─┴─ of each addend, what lies below 2^-13 of that is dropped

Every `run` columns the sum is added in fp32 and begins anew: `max_num_imprecise_acc` of the kernels, PROMOTE of their
tuning entries.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.conformance import suite
from octavo.conformance.draw import Draw
from octavo.conformance.facts import Facts
from octavo.conformance.grid.quant_weights import dense_x, exact_weight
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.lanes.accumulation import CLASSES, FP32, Accumulation
from octavo.conformance.lanes.statistical import statistical
from octavo.conformance.lanes.tolerance import product_bound
from octavo.core.backend import QuantFormat, QuantScheme

AT_ONCE = 32
BITS = 13
F8 = QuantScheme(QuantFormat.FP8_E4M3FN, activation=QuantFormat.FP8_E4M3FN)
PROMOTED = CLASSES["fp22-128"]


def tensor_cores(x_MK: torch.Tensor, w_NK: torch.Tensor, run: int) -> torch.Tensor:
    """x @ w.T as the picture has it; fp32 [M, N]."""
    K = x_MK.shape[1]
    total = torch.zeros(x_MK.shape[0], w_NK.shape[0])
    for start in range(0, K, run):
        acc = torch.zeros(total.shape, dtype=torch.float64)
        for first in range(start, min(start + run, K), AT_ONCE):
            part = slice(first, min(first + AT_ONCE, start + run, K))
            terms = torch.cat([x_MK[:, None, part] * w_NK[None, :, part], acc[..., None]], dim=-1)
            acc = _cut(_cut(terms, terms.abs().amax(-1, keepdim=True)).sum(-1))
        total += acc.float()
    return total


def _cut(x: torch.Tensor, largest: torch.Tensor | None = None) -> torch.Tensor:
    """What lies below 2^-13 of the leading bit of `largest` (x itself) is dropped."""
    _, exponent = torch.frexp(x if largest is None else largest)
    unit = torch.exp2((exponent - 1 - BITS).double())
    return (x / unit).trunc() * unit


def codes(rows: int, columns: int, mean: float) -> torch.Tensor:
    """Rows of a normal matrix in e4m3fn, each scaled to its range, as the kernels get them; in float64."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + mean
    return (x / x.abs().amax(1, keepdim=True) * 448).to(torch.float8_e4m3fn).double()


def is_within(inner: int, mean: float, run: int, declared: Accumulation) -> bool:
    x, w = codes(5, inner, mean), codes(24, inner, mean)
    want = x @ w.T
    bound = product_bound(
        want, x.square() @ w.square().T, inner=inner, dtype=torch.float32, accumulation=declared, x_dtype=torch.bfloat16
    )
    return statistical("out", tensor_cores(x, w, run), want, bound).ok


@pytest.mark.parametrize("run", [32, 128])
@pytest.mark.parametrize("mean", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("inner", [256, 512, 4096, 14336])
def test_promoted_sums_keep_the_class_that_is_declared(inner: int, mean: float, run: int) -> None:
    assert is_within(inner, mean, run, PROMOTED)


def test_terms_that_are_all_alike_are_the_worst_of_a_run() -> None:
    """Each loses nearly a whole unit of the sum so far, in one direction."""
    x = torch.full((1, 4096), 15.0, dtype=torch.float64)
    want = (x @ x.T) * 17 / 15
    found = tensor_cores(x, x * 17 / 15, 128)  # 255: each bit below the leading one is there to be lost
    lost = float((want - found) / want)
    assert 0 < lost < 4 * PROMOTED.error(4096)


def test_they_are_no_sums_in_fp32_not_even_one_instruction_at_a_time() -> None:
    assert not is_within(512, 0.1, 128, FP32)
    assert not is_within(512, 0.1, 32, FP32)


def test_sums_that_nobody_promotes_miss_the_class() -> None:
    assert not is_within(4096, 1.0, 4096, PROMOTED)
    assert not is_within(14336, 0.5, 14336, PROMOTED)


@pytest.mark.parametrize("inner", [256, 320, 512])
def test_what_the_exact_lane_draws_for_the_class_is_exact(inner: int) -> None:
    facts = Facts.of(replace(HostBackend().capabilities, accumulation={"gemm/float8": "fp22-128"}))
    draw = Draw(3, f"runs/{inner}", "gemm/float8", facts)
    assert draw.accumulation is PROMOTED
    weight = exact_weight(F8, 40, inner, draw, dtype=torch.bfloat16)
    x = dense_x(F8, 30, inner, draw, largest=weight.largest, dtype=torch.bfloat16).double()
    for run in (32, 128):
        assert torch.equal(tensor_cores(x, weight.dense(), run).double(), x @ weight.dense().T)


def test_only_cases_of_8_bit_floats_on_both_sides_ask_for_their_class() -> None:
    cases = suite.families()
    assert cases["gemm.quantised.exact/fp8_e4m3fn-row-a.fp8_e4m3fn-bfloat16.float32-m17-n48-k256"].summed_as == (
        "gemm/float8"
    )
    assert cases["gemm.quantised.exact/int8-row-a.int8-bfloat16.float32-m17-n48-k256"].summed_as == "gemm"
    assert {case.summed_as for case in cases.values() if case.op == "grouped_gemm"} == {
        "grouped_gemm", "grouped_gemm/float8",
    }  # fmt: skip
    facts = Facts.of(replace(HostBackend().capabilities, accumulation={"gemm": "tf32", "gemm/float8": "fp22-128"}))
    assert [facts.accumulation_of(op) for op in ("gemm", "gemm/float8", "grouped_gemm/float8")] == [
        "tf32", "fp22-128", "fp32",
    ]  # fmt: skip
