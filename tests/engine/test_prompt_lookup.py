"""Prompt lookup: what it finds, checked against a plain search, and what it keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.engine.prompt_lookup import MAX_TAIL, MIN_TAIL, PromptLookup
from tests.sched.build import request_of


def propose(token_ids, num_tokens):
    return PromptLookup().propose(request_of("r", token_ids), num_tokens)


@pytest.mark.parametrize(
    ("token_ids", "num_tokens", "guess"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, (4, 9)),
        ([1, 2, 3, 4, 9, 1, 2, 3], 9, (4, 9, 1, 2, 3, 4, 9, 1, 2)),  # it runs on into itself
        ([7, 7, 7], 4, (7, 7, 7, 7)),
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, (6,)),  # the latest
        ([3, 1, 2, 5, 4, 1, 2, 6, 3, 1, 2], 1, (5,)),  # the longest before the latest
        ([1, 2, 3, 4, 5], 3, ()),
        ([1, 2, 1, 3, 1], 3, ()),  # a single token proves nothing
        ([5], 3, ()),
        ([5, 5], 3, ()),
    ],
)
def test_what_followed_the_last_time(token_ids, num_tokens, guess):
    assert propose(token_ids, num_tokens) == guess


def searched(token_ids: list[int], num_tokens: int) -> tuple[int, ...]:
    """The same by trying every place."""
    for length in range(MAX_TAIL, MIN_TAIL - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                period = token_ids[end:]
                return tuple(period[i % len(period)] for i in range(num_tokens))
    return ()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_as_a_plain_search(token_ids, num_tokens):
    assert propose(token_ids, num_tokens) == searched(token_ids, num_tokens)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6))
def test_a_text_that_grows(pieces):
    request, lookup, text = request_of("r", pieces[0]), PromptLookup(), list(pieces[0])
    assert lookup.propose(request, 3) == searched(text, 3)
    for piece in pieces[1:]:
        text += piece
        request.token_ids += piece
        assert lookup.propose(request, 3) == searched(text, 3)


def test_a_name_used_again_begins_anew():
    lookup = PromptLookup()
    assert lookup.propose(request_of("r", [1, 2, 3, 1, 2]), 1) == (3,)
    lookup.forget("r")
    lookup.forget("unknown")
    assert lookup.propose(request_of("r", [4, 5, 6, 4, 5]), 1) == (6,)
