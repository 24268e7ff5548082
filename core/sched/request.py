"""One choice of one request, and its counters.

    token_ids      [ prompt ............ | outputs ..... ]
                   0 ── cached ── computed ───────── num_tokens        cached <= computed <= num_tokens

A step gives a request tokens from `num_computed_tokens` on, to catch up with `num_tokens`; there is no prefill phase
and no decode phase. Only the Scheduler writes a Request; the block manager reads it and keeps its hash memo there.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.base.pooling import PoolingJob


class RequestStatus(enum.Enum):
    """Where a request is. Only RUNNING requests hold KV blocks."""

    WAITING = "waiting"  # never started
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its KV lost
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A choice on its way through the scheduler.

    Attributes set by the caller:
        request_id: unique among the live requests.
        prompt_token_ids: at least one id, all inside the vocabulary.
        sampling: `n` is ignored: the engine makes one Request per choice.
        choice_index, parent_id: which choice of which request; choices of one parent share the prompt's blocks.
        eos_token_ids: end the choice unless sampling.ignore_eos.
        priority: lower runs earlier; used by the priority policy only.
        arrival_time: seconds on any one clock; used by the priority policy's ageing only.
        cache_salt: requests share cached blocks only within one salt.
        adapter_id: the adapter's content identity (not its name), or None for the base model.
        pooling: the request wants a vector and no tokens (sampling.max_tokens is 0); it ends with its prompt.

    Attributes set by the scheduler:
        token_ids, output_token_ids: everything known so far, and the sampled part.
        max_tokens: sampling.max_tokens, or where that is None what the context and the KV pool leave.
        rotary_offset: added to its positions; 0 unless the model's rotary frequencies depend on a request's length.
        end_token_ids: every id that ends the choice.
        order: (rank, arrival); the smaller one is served first. Fixed when the request is added.
        num_computed_tokens: tokens whose KV is in the cache.
        num_cached_tokens: of the prompt, found in the prefix cache at the first start; what is recomputed after a
            preemption, or shared with a sibling choice, is not counted.
        prompt_logprobs_delivered: they are computed once, even when a preemption has the prompt computed again.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    choice_index: int = 0
    parent_id: str | None = None
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_time: float = 0.0
    cache_salt: str | None = None
    adapter_id: str | None = None
    pooling: PoolingJob | None = None

    token_ids: list[int] = field(init=False)
    output_token_ids: list[int] = field(init=False, default_factory=list)
    max_tokens: int = field(init=False, default=0)
    rotary_offset: int = field(init=False, default=0)
    end_token_ids: frozenset[int] = field(init=False)
    order: tuple[float, int] = field(init=False, default=(0.0, 0))
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    prompt_logprobs_delivered: bool = field(init=False, default=False)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    block_hashes: dict[int, list[bytes]] = field(init=False, default_factory=dict, repr=False)
    """Block size -> hash of each full block so far: the block manager's memo, grown as tokens come."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        eos = frozenset() if self.sampling.ignore_eos else self.eos_token_ids
        self.end_token_ids = eos | frozenset(self.sampling.stop_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the logprobs of the prompt are still to be computed."""
        return self.sampling.prompt_logprobs is not None and not self.prompt_logprobs_delivered

    @property
    def needs_every_token(self) -> bool:
        """Whether every prompt position must be computed, cache hits or not."""
        return self.needs_prompt_logprobs or (self.pooling is not None and self.pooling.needs_every_token)

    def ends_with(self, token_id: int) -> FinishReason | None:
        """Why the choice ends with the output token that was appended last; None while it goes on."""
        num_outputs = len(self.output_token_ids)
        # Before min_tokens an end is drawn only where the form of the reply leaves nothing else.
        may_end = num_outputs > self.sampling.min_tokens or self.sampling.structured is not None
        if may_end and token_id in self.end_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_outputs >= self.max_tokens else None
