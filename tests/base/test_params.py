"""SamplingParams takes what people write, and refuses the rest with the field's name and limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams


def test_what_people_write_becomes_one_form() -> None:
    params = SamplingParams(
        temperature=1, top_p=1, min_p=0, repetition_penalty=2, presence_penalty=-1, frequency_penalty=1,
        stop="end", stop_token_ids=[1, 2], logit_bias={"5": 3}, bad_words_token_ids=[[1, 2]], allowed_token_ids=[7],
    )  # fmt: skip
    assert all(
        isinstance(getattr(params, name), float)
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("end",), (1, 2), {5: 3.0})
    assert (params.bad_words_token_ids, params.allowed_token_ids) == (((1, 2),), (7,))
    assert params.with_(temperature=0).greedy
    assert params == params.with_()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, 129, 1.5, True, "2"]),
        ("max_tokens", [-1, 2.5]),
        ("min_tokens", [-1, 17]),  # 17 is above the default max_tokens
        ("temperature", [-0.1, math.nan, math.inf, "hot", None, True]),
        ("top_k", [-2, 1.0]),
        ("top_p", [0, -1, 1.1, "1", None]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, math.inf, math.nan, "1"]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("seed", [2**64, -(2**63) - 1, 0.5]),
        ("logprobs", [-1, 1025, True]),
        ("prompt_logprobs", [-1, 1025]),
        ("stop", [[""], ["x" * 1025], [3]]),
        ("logit_bias", [{1: 101}, {1: math.nan}, {"one": 1}, {1: "much"}]),
        ("allowed_token_ids", [[]]),
        ("bad_words", [[""], [3]]),
    ],
)
def test_values_out_of_range(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {10: 1}},
        {"allowed_token_ids": [0, 10]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1.0]},
        {"bad_words_token_ids": [[1], [2, 10]]},
    ],
)
def test_token_ids_outside_the_vocabulary(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**changes).validate(10)
    assert caught.value.field in changes


def test_too_many_stop_strings() -> None:
    with pytest.raises(InvalidRequest, match="64"):
        SamplingParams(stop=[str(i) for i in range(65)])
