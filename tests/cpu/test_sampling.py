"""The native `sample` op: the reference's choices, its valid sets, its distribution, and a row that is its own."""

from __future__ import annotations

import pytest
import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.sampling import SamplingOps
from octavo.core.backend.reference_sample import sample_reference
from octavo.core.base.errors import UnsupportedOp

LIBRARY = native.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no compiler, no kernels")


@pytest.fixture(scope="module", params=LIBRARY.supported_isas() if LIBRARY else [])
def ops(request: pytest.FixtureRequest) -> SamplingOps:
    assert LIBRARY is not None
    context = native.NativeContext(LIBRARY, 2, isa=request.param)
    ops = SamplingOps(context)
    ops.context = context  # type: ignore[attr-defined]  # keeps it alive
    return ops


def draw(ops: SamplingOps, logits_RV, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    rows = len(logits_RV)

    def column(value, dtype=torch.float32):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    out = torch.full((rows,), -7, dtype=torch.int64)
    arguments = (
        column(temperature), column(top_k, torch.int64), column(top_p), column(min_p), column(uniform),
    )  # fmt: skip
    ops.sample(logits_RV, *arguments, out=out)
    return out, sample_reference(logits_RV, *arguments)


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 1000, 49152])
def test_it_chooses_as_the_reference_does(ops: SamplingOps, vocab: int) -> None:
    """Apart from sums that round differently at a boundary, of which there may be one in a hundred draws at most."""
    torch.manual_seed(vocab)
    rows = 64 if vocab < 10_000 else 8
    logits = torch.randn(rows, vocab) * 3
    for settings in (
        {},
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1e-3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": vocab + 5},
        {"top_p": 0.3},
        {"top_p": 0.95, "top_k": 50},
        {"min_p": 0.1},
        {"temperature": 2.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    ):
        got, expected = draw(ops, logits, uniform=torch.rand(rows), **settings)
        assert (got != expected).sum() <= 1, settings


def test_ties_go_to_the_lowest_id_when_greedy_and_are_all_kept_by_top_k(ops: SamplingOps) -> None:
    logits = torch.zeros(1, 100)
    assert draw(ops, logits, temperature=0.0)[0].item() == 0
    assert draw(ops, logits, top_k=1, uniform=0.999)[0].item() == 99
    logits[0, 40:60] = 1.0
    assert draw(ops, logits, temperature=0.0)[0].item() == 40
    assert draw(ops, logits, top_k=1, uniform=0.0)[0].item() == 40


def test_masked_tokens_are_never_drawn(ops: SamplingOps) -> None:
    logits = torch.full((4, 333), -torch.inf)
    logits[:, 77] = -50.0
    for uniform in (0.0, 0.5, 0.9999999):
        for settings in ({}, {"top_p": 0.5}, {"top_k": 10}, {"min_p": 1.0}, {"temperature": 0.0}):
            assert draw(ops, logits, uniform=uniform, **settings)[0].tolist() == [77] * 4


def test_the_kept_set_is_what_top_k_top_p_and_min_p_say(ops: SamplingOps) -> None:
    probabilities = torch.tensor([0.05, 0.4, 0.05, 0.3, 0.2])
    logits = probabilities.log().repeat(200, 1)
    uniform = torch.linspace(0, 0.999999, 200)

    def kept(**settings):
        return set(draw(ops, logits, uniform=uniform, **settings)[0].tolist())

    assert kept() == {0, 1, 2, 3, 4}
    assert kept(top_k=2) == {1, 3}
    assert kept(top_p=0.65) == {1, 3}
    assert kept(top_p=0.75) == {1, 3, 4}
    assert kept(top_p=0.5, top_k=2) == {1}  # 0.4 of the 0.7 that top-k leaves
    assert kept(min_p=0.6) == {1, 3}


def test_frequencies_follow_the_probabilities(ops: SamplingOps) -> None:
    """Evenly spaced uniform numbers give each token its share, to one part in the number of draws."""
    torch.manual_seed(0)
    logits = torch.randn(1, 50)
    draws = 4000
    uniform = (torch.arange(draws) + 0.5) / draws
    counts = torch.bincount(draw(ops, logits.repeat(draws, 1), uniform=uniform)[0], minlength=50)
    assert torch.allclose(counts / draws, logits[0].softmax(-1), atol=1.5 / draws)


def test_a_row_is_drawn_alike_alone_and_in_a_batch(ops: SamplingOps) -> None:
    torch.manual_seed(1)
    logits, uniform = torch.randn(33, 5000), torch.rand(33)
    together = draw(ops, logits, top_p=0.9, top_k=100, uniform=uniform)[0]
    alone = [draw(ops, logits[i : i + 1], top_p=0.9, top_k=100, uniform=uniform[i])[0].item() for i in range(33)]
    assert together.tolist() == alone


@pytest.mark.parametrize("place", [0, 15, 16, 99, 100])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_without_a_finite_maximum_gets_no_token(ops: SamplingOps, value: float, place: int) -> None:
    logits = torch.randn(3, 101)
    logits[1, place] = value
    for settings in ({}, {"temperature": 0.0}, {"top_p": 0.5}):
        got, expected = draw(ops, logits, **settings)
        assert got.tolist() == expected.tolist()
        assert [token_id == -1 for token_id in got.tolist()] == [False, True, False]
    assert draw(ops, torch.full((1, 5), -torch.inf))[0].item() == -1


def test_other_types_are_refused(ops: SamplingOps) -> None:
    with pytest.raises(UnsupportedOp, match="fp32"):
        draw(ops, torch.zeros(2, 8, dtype=torch.float64))
