"""A step while it is put together, and what update() must account for once its result is there.

    budget ── tokens left to give          scheduled ── (request, tokens), in batch order
    new_requests, running, preempted ── what the runner is told

Only the Scheduler uses it, one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.sched.output import BlockIds, NewRequest, RunningRequest, SchedulerOutput
from octavo.core.sched.request import Request


@dataclass(slots=True, eq=False)
class Step:
    """One step's plan.

    Attributes:
        step_id: counts up.
        budget: tokens left to give.
        gate_checks: waiting requests that may still be shown to the gates.
        scheduled: each request with its tokens, guesses not among them.
        num_tokens: of the step, num_drafts guesses among them.
    """

    step_id: int
    budget: int
    gate_checks: int
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    num_tokens: int = 0
    num_drafts: int = 0
    _new_requests: list[NewRequest] = field(default_factory=list)
    _running: dict[str, RunningRequest] = field(default_factory=dict)
    _drafts: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def start(self, request: Request, block_ids: BlockIds, num_tokens: int) -> None:
        """Give tokens to a request that the runner has no row for."""
        self._new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling=request.sampling,
                choice_index=request.choice_index,
                end_token_ids=request.end_token_ids,
                block_ids=block_ids,
                num_computed_tokens=request.num_computed_tokens,
                adapter_id=request.adapter_id,
                rotary_offset=request.rotary_offset,
                resumed=request.num_preemptions > 0,
                needs_prompt_logprobs=request.needs_prompt_logprobs,
                pooling=request.pooling,
            )
        )
        self._give(request, num_tokens)

    def proceed(self, request: Request, new_block_ids: BlockIds, num_tokens: int) -> None:
        """Give tokens to a request that the runner has a row for."""
        name = request.request_id
        self._running[name] = RunningRequest(name, new_block_ids, request.num_computed_tokens)
        self._give(request, num_tokens)

    def proceeds(self, request: Request) -> bool:
        """Whether the request is in the step and the runner has a row for it."""
        return request.request_id in self._running

    def draft(self, request: Request, new_block_ids: BlockIds, token_ids: tuple[int, ...]) -> None:
        """Let a request that proceeds compute guesses behind its tokens, in further blocks."""
        name = request.request_id
        given = self._running[name].new_block_ids
        more = tuple(old + new for old, new in zip(given, new_block_ids, strict=True))
        self._running[name] = RunningRequest(name, more, request.num_computed_tokens)
        self._drafts[name] = token_ids
        self.num_drafts += len(token_ids)
        self._count(len(token_ids))

    def num_drafted(self, request: Request) -> int:
        """How many guesses of a request the step carries."""
        return len(self._drafts.get(request.request_id, ()))

    def output(self, finished_request_ids: list[str], block_copies: tuple[tuple[int, int], ...]) -> SchedulerOutput:
        """The step as the runner gets it."""
        return SchedulerOutput(
            step_id=self.step_id,
            new_requests=tuple(self._new_requests),
            running=tuple(self._running.values()),
            num_scheduled_tokens={
                request.request_id: num_tokens + self.num_drafted(request) for request, num_tokens in self.scheduled
            },
            finished_request_ids=tuple(finished_request_ids),
            preempted_request_ids=tuple(self.preempted),
            block_copies=block_copies,
            total_num_scheduled_tokens=self.num_tokens,
            drafts=self._drafts,
        )

    def _give(self, request: Request, num_tokens: int) -> None:
        self.scheduled.append((request, num_tokens))
        self._count(num_tokens)

    def _count(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        self.num_tokens += num_tokens
