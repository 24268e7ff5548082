"""Engine, Worker and runner over the Null backend: whatever happens, each choice gets exactly its predicted tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.core.base.errors import EngineDead
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.wire import EngineRequest
from tests.engine.worlds import NullWorld, Replies, Reply, check_all_is_free, drive
from tests.fakes.null_model import continuation

VOCAB = 97
EOS = 5
SMALL: dict[str, Any] = {"block_size": 4, "max_num_seqs": 8}
TIGHT: dict[str, Any] = SMALL | {"num_kv_blocks": 29, "max_model_len": 100}
WINDOWS = {"windows": [None, 8, 8, None]}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ample": ({}, {}),
    "chunks-of-7": ({}, SMALL | {"long_prefill_threshold": 7}),
    "chunks-of-16": ({}, SMALL | {"long_prefill_threshold": 16}),
    "chunks-of-64": ({}, {"long_prefill_threshold": 64}),
    "small-steps": ({}, SMALL | {"max_num_batched_tokens": 9}),
    "one-at-a-time": ({}, {"max_num_seqs": 1, "max_num_batched_tokens": 5}),
    "no-cache": ({}, SMALL | {"enable_prefix_caching": False}),
    "blocks-of-1": ({}, {"block_size": 1, "max_num_seqs": 8}),
    "tight": ({}, TIGHT),
    "tight-without-cache": ({}, TIGHT | {"enable_prefix_caching": False, "max_num_batched_tokens": 24}),
    "windows": (WINDOWS, SMALL),
    "windows-tight": (WINDOWS, TIGHT | {"num_kv_blocks": 40, "max_num_batched_tokens": 16}),
    "priorities-tight": ({}, TIGHT | {"scheduling_policy": "priority"}),
}


def random_requests(rng: random.Random, count: int) -> list[EngineRequest]:
    """Prompts of up to 60 tokens, half of them with a beginning they share; up to 40 tokens of reply."""
    roots = [[rng.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
    requests = []
    for number in range(count):
        prompt = rng.choice(roots)[: rng.randrange(30)] if rng.random() < 0.5 else []
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 31))]
        max_tokens = rng.randrange(1, 41)
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 4)),
            temperature=0.0,
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, rng.randrange(max_tokens + 1))),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=rng.sample(range(VOCAB), rng.choice((0, 0, 4))),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        requests.append(
            EngineRequest(
                request_id=f"r{number}",
                prompt_token_ids=prompt,
                params=params,
                eos_token_ids=(EOS,),
                priority=rng.choice((0, 0, -1, 1)),
                cache_salt=rng.choice((None, None, "salt")),
            )
        )
    return requests


def expected(request: EngineRequest) -> tuple[list[int], FinishReason, int | None]:
    """The reply of any choice, computed alone: token ids, finish_reason, stop_reason.

    Before min_tokens the ids that end a choice are not drawn: the Null model's other tokens tie, and the lowest wins.
    """
    params = request.params
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(request.eos_token_ids))
    second_best = min(token for token in range(VOCAB) if token not in ends)
    tokens = list(request.prompt_token_ids)
    reply: list[int] = []
    while len(reply) < params.max_tokens:
        token = continuation(tokens, 1, VOCAB)[0]
        if token in ends and len(reply) < params.min_tokens:
            token = second_best
        tokens.append(token)
        reply.append(token)
        if token in ends:
            return reply, FinishReason.STOP, token if token in params.stop_token_ids else None
    return reply, FinishReason.LENGTH, None


def check_reply(reply: Reply, request: EngineRequest, index: int) -> None:
    token_ids, finish_reason, stop_reason = expected(request)
    assert (reply.token_ids, reply.finish_reason, reply.stop_reason) == (token_ids, finish_reason, stop_reason)
    if request.params.prompt_logprobs is not None and index == 0:
        scored = [position.token_id for position in reply.prompt_logprobs or []]
        assert scored == request.prompt_token_ids[1:]
    else:
        assert reply.prompt_logprobs is None


@pytest.mark.parametrize("case", CONFIGS)
def test_replies_do_not_depend_on_how_they_are_scheduled(null: NullWorld, case: str) -> None:
    facts, options = CONFIGS[case]
    engine = null.engine(facts, **({"num_kv_blocks": 600, "max_num_batched_tokens": 64, "max_num_seqs": 64} | options))
    for seed in (1, 2):  # the second time the cache is warm
        requests = random_requests(random.Random(seed), 24)
        before = engine.stats()
        replies = drive(engine, requests)
        assert len(replies) == sum(request.params.n for request in requests)
        for request in requests:
            for index in range(request.params.n):
                check_reply(replies[request.request_id, index], request, index)
        check_all_is_free(engine)
        generated = engine.stats().generated_tokens - before.generated_tokens
        assert generated == sum(len(reply.token_ids) for reply in replies.values())
    assert (engine.stats().preemptions > 0) == ("tight" in case)
    engine.close()
    del engine
    null.check_nothing_is_left()


@pytest.mark.parametrize("case", ["ample", "tight", "windows-tight", "priorities-tight", "small-steps"])
def test_requests_come_and_go_at_any_moment(null: NullWorld, case: str) -> None:
    """sglang#35270, sglang-jax#982: blocks that choices share are counted and freed once, whoever ends first."""
    facts, options = CONFIGS[case]
    engine = null.engine(facts, **({"num_kv_blocks": 600, "max_num_batched_tokens": 64, "max_num_seqs": 64} | options))
    rng = random.Random(7)
    requests = random_requests(rng, 40)
    coming, aborted, replies = list(requests), set(), Replies()
    while coming or engine.has_work():
        for _ in range(min(len(coming), rng.randrange(3))):
            engine.add_request(coming.pop())
        replies.take(engine.step())
        if rng.random() < 0.3:
            request = rng.choice(requests)
            choice = (request.request_id, rng.randrange(request.params.n))
            ended = engine.abort([choice])
            replies.take(ended)
            aborted |= {(output.request_id, output.index) for output in ended}
        engine.check_integrity()
    for request in requests:
        for index in range(request.params.n):
            reply = replies[request.request_id, index]
            if (request.request_id, index) in aborted:
                assert reply.finish_reason is FinishReason.ABORT
                assert reply.token_ids == expected(request)[0][: len(reply.token_ids)]
            else:
                check_reply(reply, request, index)
    assert aborted
    assert engine.stats().finished[FinishReason.ABORT] == len(aborted)
    check_all_is_free(engine)
    engine.close()


def test_an_abort_before_the_first_step_and_after_the_last_one(null: NullWorld) -> None:
    engine = null.engine(num_kv_blocks=50)
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(n=2, max_tokens=3))
    engine.add_request(request)
    ended = engine.abort([("a", 0), ("a", 1), ("a", 2), ("b", 0)])
    assert [(output.index, output.finish_reason) for output in ended] == [
        (0, FinishReason.ABORT),
        (1, FinishReason.ABORT),
    ]
    assert not engine.has_work()
    drive(engine, [request])  # the id is free again
    assert engine.abort([("a", 0)]) == []
    check_all_is_free(engine)
    engine.close()


def test_a_step_that_fails_ends_the_engine(null: NullWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null.engine(num_kv_blocks=50)
    request = EngineRequest(request_id="a", prompt_token_ids=[1], params=SamplingParams(max_tokens=3))
    engine.add_request(request)

    def broken(*_args: Any) -> None:
        raise RuntimeError("the device fell off")

    monkeypatch.setattr("tests.fakes.null_model.NullModel.forward", broken)
    monkeypatch.setattr("octavo.core.backend.device.PlainProgram.run", broken)
    with pytest.raises(RuntimeError, match="fell off"):
        engine.step()
    with pytest.raises(EngineDead, match="RuntimeError: the device fell off"):
        engine.step()
    with pytest.raises(EngineDead, match="fell off"):
        engine.add_request(request)
    engine.close()
    null.check_nothing_is_left()


def test_a_closed_engine_says_so(null: NullWorld) -> None:
    engine = null.engine(num_kv_blocks=50)
    engine.close()
    engine.close()
    with pytest.raises(EngineDead, match="closed"):
        engine.step()


def test_two_engines_in_one_process_do_not_disturb_each_other(null: NullWorld) -> None:
    first = null.engine(WINDOWS, **TIGHT | {"num_kv_blocks": 40})
    second = null.engine(num_kv_blocks=100)
    both = [(first, random_requests(random.Random(1), 12)), (second, random_requests(random.Random(2), 12))]
    replies = [Replies(), Replies()]
    for engine, requests in both:
        for request in requests:
            engine.add_request(request)
    while first.has_work() or second.has_work():
        for (engine, _), found in zip(both, replies, strict=True):
            if engine.has_work():
                found.take(engine.step())
                engine.check_integrity()
        if not first.has_work():
            first.close()
    for (_, requests), found in zip(both, replies, strict=True):
        for request in requests:
            for index in range(request.params.n):
                check_reply(found[request.request_id, index], request, index)
    second.close()
    del first, second, both, engine
    null.check_nothing_is_left()


def test_priorities_decide_who_is_served_first(null: NullWorld) -> None:
    engine = null.engine(num_kv_blocks=50, max_num_seqs=1, scheduling_policy="priority")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    requests = [
        EngineRequest(request_id=name, prompt_token_ids=[1], params=params, priority=priority)
        for name, priority in (("low", 2), ("middle", 1), ("high", 0), ("later", 1))
    ]
    finished: list[str] = []

    def note(replies: Replies) -> None:
        finished.extend(key[0] for key, reply in replies.items() if reply.finish_reason and key[0] not in finished)

    drive(engine, requests, between=note)
    assert finished == ["high", "middle", "later", "low"]
    engine.close()
