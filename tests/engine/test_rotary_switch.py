"""Requests on both sides of a length at which rotary frequencies change; see docs/decisions/0013."""

from __future__ import annotations

from typing import Any

import pytest

from octavo import LLM, SamplingParams
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES

SWITCH, MAX_MODEL_LEN = 32, 128
SHORT = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG = [4.0, 6.0, 9.0, 14.0, 20.0, 30.0]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}


def longrope(short: list[float]) -> dict[str, Any]:
    return {
        "max_position_embeddings": MAX_MODEL_LEN,
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": short,
            "long_factor": LONG,
        },
    }


def dynamic(num_tokens: int) -> dict[str, Any]:
    """The unscaled base that dynamic scaling comes to for requests of so many tokens."""
    head_dim = 12
    stretch = DYNAMIC["factor"] * num_tokens / SWITCH - (DYNAMIC["factor"] - 1)
    theta = DYNAMIC["rope_theta"] * stretch ** (head_dim / (head_dim - 2))
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# family, its config, the configs that all short and all long requests of it equal
CASES = {
    "longrope": ("phi3", longrope(SHORT), longrope(SHORT), longrope(LONG)),
    "dynamic": (
        "llama",
        {"max_position_embeddings": SWITCH, "rope_parameters": DYNAMIC},
        dynamic(SWITCH),
        dynamic(MAX_MODEL_LEN),
    ),
}
REQUESTS = [  # prompt, reply, which kind: by the most tokens whose KV the request may compute
    (20, 4, "short"),
    (20, 13, "short"),
    (20, 14, "long"),
    (40, 10, "long"),
    (30, 10, "long"),
    (30, 3, "short"),
]


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("batched_tokens", [8, 256])
def test_a_request_has_one_kind_of_positions_whatever_runs_beside_it(scheme, batched_tokens, tmp_path):
    """transformers#33129, vllm#27431: short and long factors in one cache."""
    family, config, short, long = CASES[scheme]
    tiny = FAMILIES[family]
    models = {"short": tiny.make(**short), "long": tiny.make(**long)}
    directory = tiny_models.save(tiny.make(**config), tmp_path)
    prompts = [tiny_models.random_prompt(199, length) for length, _, _ in REQUESTS]
    params = [SamplingParams(temperature=0.0, max_tokens=reply) for _, reply, _ in REQUESTS]
    expected = [
        tiny_models.greedy(models[kind], prompt, reply)
        for prompt, (_, reply, kind) in zip(prompts, REQUESTS, strict=True)
    ]
    other = {"short": models["long"], "long": models["short"]}
    mistaken = [
        tiny_models.greedy(other[kind], prompt, reply)
        for prompt, (_, reply, kind) in zip(prompts, REQUESTS, strict=True)
    ]
    differing = [kind for one, two, (*_, kind) in zip(expected, mistaken, REQUESTS, strict=True) if one != two]
    assert set(differing) == {"short", "long"}  # so that a mistake in either direction shows
    options = {"block_size": 4, "num_kv_blocks": 200, "max_num_seqs": 6, "max_num_batched_tokens": batched_tokens}
    with LLM(str(directory), **options) as llm:
        together = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in together] == expected
        alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
        assert [output.outputs[0].token_ids for output in alone] == expected
        assert all(output.num_cached_tokens for output in alone)


def test_the_whole_of_a_request_counts_where_its_reply_is_open(tmp_path):
    family, config, _, long = CASES["longrope"]
    tiny = FAMILIES[family]
    directory = tiny_models.save(tiny.make(**config), tmp_path)
    prompt = tiny_models.random_prompt(199, 20)
    with LLM(str(directory), num_kv_blocks=40, max_num_seqs=2) as llm:
        open_ended = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=None))[0]
    expected = tiny_models.greedy(tiny.make(**long), prompt, MAX_MODEL_LEN - 20)
    assert open_ended.outputs[0].token_ids == expected


@pytest.mark.parametrize("length", [20, 40])
def test_requests_on_one_side_equal_hugging_face(length, tmp_path):
    """What its own class answers, which looks at the length of the sequence so far."""
    tiny = FAMILIES["phi3"]
    model = tiny.make(**longrope(SHORT))
    prompt = tiny_models.random_prompt(199, length)
    with LLM(str(tiny_models.save(model, tmp_path)), num_kv_blocks=40, max_num_seqs=2) as llm:
        output = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert output.outputs[0].token_ids == tiny_models.greedy(model, prompt, 12)
