"""What crosses the line between scheduler, model runner and engine. Immutable; a step says only what changed.

    Scheduler.schedule() ── SchedulerOutput ──> runner ── ModelRunnerOutput ──> Scheduler.update() ── RequestDelta ─>

The runner applies a SchedulerOutput in this order: forget finished_request_ids and preempted_request_ids; add
new_requests; advance running; apply block_copies one after the other; only then write KV. An output without tokens
still goes to the runner, because it may carry finished ids. Token and block ids are plain ints; token positions
count from the start of the prompt.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.base.pooling import PoolingJob

BlockIds = tuple[tuple[int, ...], ...]
"""Per KV group, block ids in table order."""


class NewRequest(Struct, frozen=True, kw_only=True):
    """A request the runner holds no row for: it starts, or comes back after a preemption.

    Attributes:
        token_ids: every token known so far (the prompt, and when resumed the outputs too).
        num_prompt_tokens: how many of them are the prompt.
        end_token_ids: EOS ids (unless ignored) and stop ids, which the sampler holds back before min_tokens.
        block_ids: the whole block table of each group; 0 where a block lies left of the window.
        num_computed_tokens: tokens whose KV is in the cache before this step (cache hits, or a sibling's prompt).
        rotary_offset: added to the positions that the model sees; slots and lengths count without it.
        resumed: it was preempted before and recomputes what it had.
        needs_prompt_logprobs: prompt logprobs are wanted and were not delivered yet; no token is skipped by a
            cache hit then, and the runner delivers them once, in the step that computes the last prompt token.
        pooling: a vector is wanted instead of tokens.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int
    end_token_ids: frozenset[int]
    block_ids: BlockIds
    num_computed_tokens: int
    adapter_id: str | None
    resumed: bool
    needs_prompt_logprobs: bool
    pooling: PoolingJob | None = None
    rotary_offset: int = 0


class RunningRequest(Struct, frozen=True, gc=False):
    """A request the runner has a row for.

    Attributes:
        new_block_ids: per group, block ids to append to the table.
        num_computed_tokens: tokens whose KV is in the cache before this step.
    """

    request_id: str
    new_block_ids: BlockIds
    num_computed_tokens: int


class SchedulerOutput(Struct, frozen=True, kw_only=True):
    """One step's work.

    Attributes:
        step_id: counts up; given back to update().
        num_scheduled_tokens: request id -> tokens to compute from num_computed_tokens on; its order is the batch's.
        finished_request_ids: ended since the last step (aborts included); an id may return in new_requests.
        preempted_request_ids: lost their blocks since the last step; they come back in new_requests.
        block_copies: (source, destination) block ids to copy in all layers, in order, before any KV is written.
        total_num_scheduled_tokens: the sum of num_scheduled_tokens; 0 means nothing to compute.
        masks: request id -> a bit for each token that it may draw (lowest id in the lowest bit); filled in by the
            engine for requests with a grammar.
        drafts: request id -> guesses behind its last known token, which are computed too: they are counted in
            num_scheduled_tokens, and the runner draws at each of them (drafting.py).
    """

    step_id: int
    new_requests: tuple[NewRequest, ...]
    running: tuple[RunningRequest, ...]
    num_scheduled_tokens: dict[str, int]
    finished_request_ids: tuple[str, ...]
    preempted_request_ids: tuple[str, ...]
    block_copies: tuple[tuple[int, int], ...]
    total_num_scheduled_tokens: int
    masks: dict[str, bytes] = field(default_factory=dict)
    drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)


class SampledTokens(Struct, frozen=True):
    """What a request drew in one step: at least one token, and the logprobs of each where asked (opaque here).

    Of a request with drafts all tokens but the last are drafts that held, and so were computed in the step.
    """

    token_ids: tuple[int, ...]
    logprobs: Any = None


class ModelRunnerOutput(Struct, frozen=True, kw_only=True):
    """One step's result.

    Attributes:
        sampled: for each request whose last known token was computed in this step (max_tokens=0 may be left out).
        prompt_logprobs: opaque; for the whole prompt, in the step that computed its last token.
        pooled: opaque; the vector of each pooling request whose last prompt token was computed in this step.
        failed: request id -> why this request alone failed (NaN logits, …).
    """

    sampled: dict[str, SampledTokens] = field(default_factory=dict)
    prompt_logprobs: dict[str, Any] = field(default_factory=dict)
    pooled: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class RequestDelta(Struct, frozen=True):
    """What one request gained in one step.

    Attributes:
        new_token_ids: the token that ended the choice (EOS id, stop id) is included.
        finish_reason: None while the request goes on.
        stop_reason: the stop token id, or what an abort named as its reason; None for an EOS id.
        num_cached_tokens: prompt tokens found in the prefix cache when the request first started.
        error: why it failed, with FinishReason.ERROR.
        pooled: what a pooling request asked for, with its last delta.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    logprobs: Any = None
    prompt_logprobs: Any = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    pooled: Any = None
