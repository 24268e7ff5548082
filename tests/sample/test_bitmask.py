"""A grammar's mask: what it forbids is never drawn, rows without one are untouched, widths may differ."""

import pytest
import torch

from octavo.core.sample.bitmask import apply_masks


def mask(ids, num_bytes):
    return sum(1 << i for i in ids).to_bytes(num_bytes, "little")


@pytest.mark.parametrize("num_bytes", [1, 2, 4])
def test_only_named_tokens_stay(num_bytes):
    logits = torch.arange(30.0).reshape(3, 10)
    before = logits.clone()
    apply_masks(logits, {0: mask([0, 7], num_bytes), 2: mask([3], num_bytes)})
    assert logits.isfinite().nonzero().tolist() == [[0, 0], [0, 7], *[[1, i] for i in range(10)], [2, 3]]
    kept = logits.isfinite()
    assert torch.equal(logits[kept], before[kept])


def test_a_masked_row_draws_what_its_mask_allows_and_its_neighbour_does_not_care(sampler, row):
    logits = torch.tensor([[5.0, 1.0, 3.0], [5.0, 1.0, 3.0]])
    drawn = sampler.sample(logits, [row(), row()], {0: mask([1, 2], 1)})
    assert drawn.token_ids == [2, 0]


def test_penalties_act_among_what_the_mask_allows(sampler, row):
    logits = torch.tensor([[5.0, 2.9, 3.0]])
    assert sampler.sample(logits, [row(outputs=[2], presence_penalty=1.0)], {0: mask([1, 2], 1)}).token_ids == [1]


def test_an_empty_mask_fails_its_row_alone(sampler, row):
    drawn = sampler.sample(torch.tensor([[5.0, 1.0], [5.0, 1.0]]), [row(), row()], {1: mask([], 1)})
    assert drawn.token_ids[0] == 0
    assert list(drawn.failed) == [1]
    assert "structured output" in drawn.failed[1]
