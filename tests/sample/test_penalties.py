"""Penalties equal their definitions and Hugging Face's processor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.base.params import SamplingParams
from octavo.core.sample.penalties import TokenCounts, apply_penalties

V = 30
IDS = st.lists(st.integers(0, V - 1), max_size=20)


def counted(prompt, output):
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.add(token_id)
    return counts


def random_logits(rows, seed=0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * 3


@given(prompt=IDS, output=IDS)
def test_repetition_equals_hugging_face(prompt, output):
    processors = pytest.importorskip("transformers").generation.logits_process
    logits = random_logits(1)
    context = torch.tensor([prompt + output], dtype=torch.int64)
    expected = processors.RepetitionPenaltyLogitsProcessor(1.3)(context, logits.clone())
    apply_penalties(logits, [0], [SamplingParams(repetition_penalty=1.3)], [counted(prompt, output)])
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=0)


@given(prompt=IDS, output=IDS)
def test_presence_and_frequency_by_definition(prompt, output):
    logits = random_logits(1)
    expected = logits.clone()
    for token_id in range(V):
        expected[0, token_id] -= 0.7 * (token_id in output) + 0.4 * output.count(token_id)
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.4)
    apply_penalties(logits, [0], [params], [counted(prompt, output)])
    torch.testing.assert_close(logits, expected)


@given(histories=st.lists(st.tuples(IDS, IDS), min_size=2, max_size=5))
def test_rows_are_penalised_each_by_its_own(histories):
    params = [
        SamplingParams(repetition_penalty=1 + 0.2 * i, presence_penalty=0.1 * i, frequency_penalty=-0.2 * i)
        for i in range(len(histories))
    ]
    counts = [counted(*history) for history in histories]
    logits = random_logits(len(histories) + 1)
    expected = logits.clone()
    for i in range(len(histories)):
        apply_penalties(expected[i + 1 : i + 2], [0], [params[i]], [counts[i]])
    apply_penalties(logits, range(1, len(histories) + 1), params, counts)
    assert torch.equal(logits, expected)


def test_masked_tokens_stay_masked_and_zero_stays_zero():
    logits = torch.tensor([[-torch.inf, 0.0, 1.0]])
    apply_penalties(logits, [0], [SamplingParams(repetition_penalty=2.0)], [counted([0, 1, 2], [])])
    assert logits.tolist() == [[-torch.inf, 0.0, 0.5]]


def test_an_empty_history_changes_nothing():
    logits = random_logits(1)
    before = logits.clone()
    apply_penalties(logits, [0], [SamplingParams(repetition_penalty=2.0)], [counted([], [])])
    assert torch.equal(logits, before)


def test_only_params_with_a_penalty_penalise():
    assert not SamplingParams().penalises
    for name, value in (("repetition_penalty", 1.1), ("presence_penalty", -1.0), ("frequency_penalty", 0.1)):
        assert SamplingParams(**{name: value}).penalises
