"""Log probabilities as plain, finite values."""

import json
import math

import pytest
import torch

from octavo.core.sample.logprobs import FLOOR_LOGPROB, position_logprobs


def test_values_ranks_and_most_likely():
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.25, 0.25]]))
    first, second = position_logprobs(logits, [2, 2], [2, 3])
    assert first.logprob == pytest.approx(math.log(0.3))
    assert (first.rank, [token_id for token_id, _ in first.top]) == (2, [1, 2])
    assert first.top[0][1] == pytest.approx(math.log(0.6))
    assert (second.rank, second.top[0][0], len(second.top)) == (2, 0, 3)


def test_no_infinity_reaches_json():
    """Case C1: masked entries are left out, the chosen one has a floor."""
    logits = torch.full((1, 10), -torch.inf)
    logits[0, 3], logits[0, 4] = 0.0, -1.0
    (entry,) = position_logprobs(logits, [7], [5])
    assert entry.logprob == FLOOR_LOGPROB
    assert [token_id for token_id, _ in entry.top] == [3, 4]
    json.dumps([entry.logprob, entry.rank, entry.top], allow_nan=False)


def test_more_than_the_vocabulary_gives_the_vocabulary():
    (entry,) = position_logprobs(torch.zeros(1, 4), [0], [1000])
    assert len(entry.top) == 4


def test_a_prompt_equals_its_positions_one_by_one():
    logits = torch.randn(150, 40, generator=torch.Generator().manual_seed(0))
    tokens = [i % 40 for i in range(150)]
    whole = position_logprobs(logits, tokens, [3] * 150)
    assert len(whole) == 150
    for i in (0, 63, 64, 149):
        assert position_logprobs(logits[i : i + 1], tokens[i : i + 1], [3]) == [whole[i]]
    assert position_logprobs(logits[:0], [], []) == []


def test_extreme_logits_stay_finite():
    (entry,) = position_logprobs(torch.tensor([[3e38, -3e38, 0.0]]), [1], [3])
    assert entry.logprob == FLOOR_LOGPROB
    assert entry.top[0] == (0, 0.0)
