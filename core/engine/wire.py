"""What crosses into and out of an engine: plain records that msgpack can carry between processes.

    front (text)  --EngineRequest-->  Engine  --EngineOutput-->  front (text)

A request of n choices is one EngineRequest; inside, each choice is a scheduler request named "{id}#{index}", and its
outputs come back one EngineOutput per choice and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.base.pooling import PoolingJob
from octavo.core.sample.logprobs import PositionLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One prompt, tokenised and checked.

    Attributes:
        request_id: unique in the engine while the request lives.
        prompt_token_ids: at least one.
        params: of all its choices; bad_words are spelled out as ids.
        eos_token_ids: end a choice unless params.ignore_eos.
        priority: lower runs earlier, under the policy "priority".
        cache_salt: only requests of one salt share cached blocks.
        pooling: a vector is wanted; params then generates nothing.
        adapter: name of the low-rank adapter that it runs with; None: the base model.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str | None = None
    pooling: PoolingJob | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOutput:
    """What one step brought one choice of a request.

    Attributes:
        request_id, index: the request and its choice.
        token_ids: new tokens, none or several.
        logprobs: one entry per new token, when asked for.
        prompt_logprobs: of every prompt position but the first; once, on choice 0's first output.
        finish_reason, stop_reason: set on the choice's last output; stop_reason is the id that ended it.
        num_cached_tokens: prompt tokens taken from the prefix cache.
        error: why the choice failed, with finish_reason ERROR.
        pooled: the vector of a pooling request, fp32 little-endian, on its only output.
    """

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What one step did to whom, for those who measure.

    Attributes:
        began: when it was scheduled, in seconds of time.monotonic(), which all processes of a machine share.
        num_tokens: computed in it.
        started: choices that began to run in it, those that come back after a preemption too.
        preempted: choices that lost their place before it.
    """

    began: float
    num_tokens: int
    started: list[tuple[str, int]]
    preempted: list[tuple[str, int]]


def choice_id(request_id: str, index: int) -> str:
    """The scheduler's name of one choice."""
    return f"{request_id}#{index}"


def split_choice_id(name: str) -> tuple[str, int]:
    """The request and index behind a scheduler's name."""
    request_id, _, index = name.rpartition("#")
    return request_id, int(index)
