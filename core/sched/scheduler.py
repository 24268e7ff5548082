"""Who computes how many tokens in each step, and what a step's result means for each request.

    add ──> waiting (a heap, by order) ──┐                          ┌──> runner ──> update ──> deltas
                 ▲                       ├── schedule(), in order ──┤
                 └─ preempted ── running (a list, by order) <───────┘

A step walks waiting and running requests merged in one order and gives each tokens, to catch up with what it knows,
until the budget is spent. A running request that finds no block makes the last running one give way (recomputing
later), so the first is never preempted and nobody starves. Every running request gets a token in every step.

The Scheduler owns requests: tokens, status, counters. It asks the BlockManager for blocks and knows none of them.
Features enter by TokenLimit and AdmissionGate (policy.py). One step is in flight at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.metrics import SchedulerCounters, SchedulerStats
from octavo.core.base.params import FinishReason
from octavo.core.sched.adapters import AdapterGate
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.door import Door
from octavo.core.sched.drafting import Drafting
from octavo.core.sched.output import ModelRunnerOutput, RequestDelta, SchedulerOutput
from octavo.core.sched.policy import (
    AdmissionGate,
    LongPrefillLimit,
    SchedulerLimits,
    SharedPrefixGate,
    SiblingGate,
    TokenLimit,
    leader_of,
    rank_of,
    victim_for,
)
from octavo.core.sched.prefix import PrefixHit
from octavo.core.sched.queue import WaitingQueue
from octavo.core.sched.request import Request, RequestStatus
from octavo.core.sched.step import Step

MIN_GATE_CHECKS_PER_STEP = 64


class Scheduler:
    """Continuous batching over one block manager.

    Args:
        limits: of a step and of a request.
        block_manager: used by this scheduler alone.
        token_limits, gates: further policies; the built-in ones are always there.
        drafting: speculative decoding; None does without.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        block_manager: BlockManager,
        *,
        token_limits: Sequence[TokenLimit] = (),
        gates: Sequence[AdmissionGate] = (),
        drafting: Drafting | None = None,
    ) -> None:
        self._limits, self._blocks = limits, block_manager
        self._door = Door(limits, block_manager)
        self._requests: dict[str, Request] = {}
        self._leaders: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # sorted by order
        self._token_limits = tuple(token_limits)
        if limits.long_prefill_threshold is not None:
            self._token_limits += (LongPrefillLimit(limits.long_prefill_threshold),)
        self._adapters = AdapterGate(limits.max_adapters, turn=limits.max_num_seqs)
        prefix_gate = SharedPrefixGate(block_manager.computing_prefix)
        self._gates = (*gates, self._adapters, SiblingGate(self._leaders), prefix_gate)
        self._headroom_blocks = int(limits.admission_headroom * block_manager.num_usable_blocks)
        self._gate_checks_per_step = max(MIN_GATE_CHECKS_PER_STEP, limits.max_num_seqs)
        self._drafting = drafting
        self._in_flight: Step | None = None
        self._finished_ids: list[str] = []
        self._num_arrivals = self._num_steps = 0
        self._counters = SchedulerCounters()

    # ------------------------------------------------------------------------------------------ requests

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: new, gated or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: no token, longer than max_model_len with its reply, or an id that is in use.
            NeverFits: its prompt and max_tokens need more blocks than there are; where max_tokens is None, its
                prompt alone does (the reply is then cut to what fits).
        """
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request_id {request.request_id!r} is still in use; give another one", field="request_id"
            )
        request.max_tokens = self._door.max_tokens(request)
        request.rotary_offset = self._door.rotary_offset(request)
        request.order = (rank_of(request, self._limits), self._num_arrivals)
        self._num_arrivals += 1
        self._requests[request.request_id] = request
        if request.parent_id is not None and request.choice_index == 0:
            self._leaders[request.parent_id] = request
        self._adapters.wait(request)
        self._waiting.push(request)

    def abort(
        self,
        request_ids: Iterable[str],
        reason: FinishReason = FinishReason.ABORT,
        stop_reason: int | str | None = None,
    ) -> list[RequestDelta]:
        """End requests at once, at any moment; what a step in flight draws for them is dropped.

        Ids that are unknown, or ended already, are ignored. Returns the last delta of each request that ended here.
        """
        deltas = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self._running.remove(request)
            else:
                self._waiting.remove(request)
            deltas.append(self._finish(request, reason, stop_reason))
        return deltas

    def stats(self) -> SchedulerStats:
        """A snapshot of gauges and totals."""
        return self._counters.stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_gated=self._waiting.num_gated,
            kv_blocks_total=self._blocks.num_usable_blocks,
            kv_blocks_used=self._blocks.num_used_blocks,
            kv_blocks_cached=self._blocks.num_cached_blocks,
        )

    # ------------------------------------------------------------------------------------------ a step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step's work. Its result must come back through update() before the next call."""
        if self._in_flight is not None:
            raise RuntimeError("schedule() was called before the last step's result came back")
        step = Step(self._num_steps + 1, self._limits.max_num_batched_tokens, self._gate_checks_per_step)
        running = self._running
        head = self._first_waiting(step)
        position = 0
        while step.budget > 0:
            if head is not None and (position == len(running) or head.order < running[position].order):
                if self._try_start(head, position, step):
                    position += 1
                    head = self._next_waiting(step)
                else:
                    head = None  # nobody passes it
            elif position < len(running):
                if self._try_continue(running[position], position, step):
                    position += 1
                if step.preempted:
                    head = None  # blocks are short, and the preempted come first
            else:
                break
        if self._drafting is not None:
            self._drafting.extend(step, self._blocks, self._headroom_blocks)
        return self._send(step)

    def _first_waiting(self, step: Step) -> Request | None:
        """Ask some of the gated requests again, then as _next_waiting()."""
        if self._waiting.num_gated and self._has_place():
            self._waiting.recall(step.gate_checks // 2)
        return self._next_waiting(step)

    def _has_place(self) -> bool:
        """Whether a waiting request might start, be it in another's place."""
        return len(self._running) < self._limits.max_num_seqs or self._limits.policy == "priority"

    def _next_waiting(self, step: Step) -> Request | None:
        """The first waiting request that no gate holds back and that may have a place."""
        if step.preempted or not self._has_place():
            return None
        while step.gate_checks > 0 and (request := self._waiting.peek()) is not None:
            if all(gate.may_start(request) is None for gate in self._gates):
                return request
            self._waiting.set_aside(request)
            step.gate_checks -= 1
        return None

    def _capped(self, request: Request, num_tokens: int, num_behind: int, step: Step) -> int:
        """How many of num_tokens to give now, leaving one for each running request behind this one."""
        num_tokens = min(num_tokens, step.budget - num_behind)
        for limit in self._token_limits:
            num_tokens = min(num_tokens, limit.cap(request, num_tokens, step.budget))
        return num_tokens

    def _try_continue(self, request: Request, position: int, step: Step) -> bool:
        """Give a running request its tokens; False when it had to give way itself."""
        running = self._running
        num_missing = len(request.token_ids) - request.num_computed_tokens
        num_tokens = self._capped(request, num_missing, len(running) - position - 1, step)
        if num_tokens <= 0:
            return True
        while (new_ids := self._blocks.try_allocate(request, num_tokens)) is None:
            if len(running) == 1:
                num_tokens = self._smaller_chunk(request, num_tokens)
                continue
            victim = running[-1]
            self._preempt(victim, step)
            if victim is request:
                return False
        step.proceed(request, new_ids, num_tokens)
        return True

    def _try_start(self, request: Request, position: int, step: Step) -> bool:
        """Start a waiting request at its place among the running ones; False when there is no room for it."""
        running = self._running
        prefix = self._blocks.find_prefix(request)
        leader = leader_of(request, self._leaders)
        fork = None if leader is None else self._blocks.find_fork(leader, request)
        if fork is not None and fork.num_tokens > prefix.num_tokens:
            prefix = fork
        num_tokens = self._capped(request, request.num_tokens - prefix.num_tokens, len(running) - position, step)
        if num_tokens <= 0:
            return False
        if len(running) >= self._limits.max_num_seqs and not self._give_way(request, step):
            return False
        while True:
            keep_free = self._headroom_blocks if running else 0
            block_ids = self._blocks.try_allocate(request, num_tokens, prefix=prefix, keep_free=keep_free)
            if block_ids is not None:
                break
            if not running:
                num_tokens = self._smaller_chunk(request, num_tokens)
            elif not self._give_way(request, step):
                return False
        self._count_start(request, prefix, shared=prefix is fork)
        running.insert(position, request)
        step.start(request, block_ids, num_tokens)
        return True

    def _smaller_chunk(self, request: Request, num_tokens: int) -> int:
        """For a request that has the whole pool: windowed groups need fewer blocks for a shorter chunk."""
        if num_tokens == 1:
            raise RuntimeError(f"{request.request_id} was let in, but one token does not fit the whole KV pool")
        return num_tokens // 2

    def _count_start(self, request: Request, prefix: PrefixHit, *, shared: bool) -> None:
        self._waiting.remove(request)
        self._adapters.start(request)
        if request.status is RequestStatus.WAITING and not shared:
            request.num_cached_tokens = prefix.num_tokens
            self._counters.prefix_query_tokens += request.num_prompt_tokens
            self._counters.prefix_hit_tokens += prefix.num_tokens
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = prefix.num_tokens

    def _give_way(self, request: Request, step: Step) -> bool:
        """Preempt one running request for a waiting one, if the policy says so."""
        victim = victim_for(self._running, request)
        if victim is not None:
            self._preempt(victim, step)
        return victim is not None

    def _preempt(self, request: Request, step: Step) -> None:
        """Take all blocks of the last running request; it has no tokens in this step yet."""
        self._running.pop()
        self._blocks.free(request)
        self._adapters.leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._counters.preemptions += 1
        step.preempted.append(request.request_id)
        self._adapters.wait(request)
        self._waiting.push(request)

    def _send(self, step: Step) -> SchedulerOutput:
        self._in_flight = step
        self._num_steps += 1
        self._counters.count_step(step.num_tokens, step.num_drafts)
        finished_ids, self._finished_ids = self._finished_ids, []
        return step.output(finished_ids, self._blocks.take_copies())

    # ------------------------------------------------------------------------------------------ its result

    def update(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestDelta]:
        """Account for a step: computed tokens, new tokens, what ended and why.

        Returns:
            A delta for each request that gained tokens or prompt logprobs, or that ended, in batch order.
        """
        step = self._in_flight
        if step is None or scheduled.step_id != step.step_id:
            raise RuntimeError(f"step {scheduled.step_id} is not in flight")
        self._in_flight = None
        deltas: list[RequestDelta] = []
        advance = self._blocks.advance
        for request, num_tokens in step.scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted meanwhile
            if result.failed and request.request_id in result.failed:
                deltas.append(self._fail(request, result.failed[request.request_id]))
                continue
            request.num_computed_tokens += num_tokens
            advance(request)
            if request.num_computed_tokens == len(request.token_ids):
                deltas.append(self._absorb(request, step.num_drafted(request), result))
        if any(delta.finish_reason is not None for delta in deltas):
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        return deltas

    def _absorb(self, request: Request, num_drafted: int, result: ModelRunnerOutput) -> RequestDelta:
        """Append what a request drew, up to the token that ends it; drafts that held are computed already."""
        request_id = request.request_id
        prompt_logprobs = None
        if request.needs_prompt_logprobs:
            prompt_logprobs = result.prompt_logprobs.get(request_id)
            request.prompt_logprobs_delivered = True
        if request.pooling is not None:
            return self._finish_pooled(request, result)
        if request.max_tokens == 0:
            return self._finish(request, FinishReason.LENGTH, None, prompt_logprobs=prompt_logprobs)
        sampled = result.sampled.get(request_id)
        if sampled is None:
            raise RuntimeError(f"the runner drew no token for {request_id}, whose last known token was computed")
        num_accepted = min(num_drafted, len(sampled.token_ids) - 1)
        if num_drafted and self._drafting is not None:
            self._drafting.saw(request, num_drafted, num_accepted)
            self._counters.accepted_tokens += num_accepted
        for i, token_id in enumerate(sampled.token_ids, start=1):
            request.output_token_ids.append(token_id)
            request.token_ids.append(token_id)
            if (reason := request.ends_with(token_id)) is not None:
                is_stop_id = reason is FinishReason.STOP and token_id in request.sampling.stop_token_ids
                self._counters.generated_tokens += i
                return self._finish(
                    request, reason, token_id if is_stop_id else None, new_token_ids=sampled.token_ids[:i],
                    logprobs=sampled.logprobs, prompt_logprobs=prompt_logprobs,
                )  # fmt: skip
        if num_accepted:
            request.num_computed_tokens += num_accepted
            self._blocks.advance(request)
        self._counters.generated_tokens += len(sampled.token_ids)
        cached = request.num_cached_tokens
        return RequestDelta(request_id, sampled.token_ids, sampled.logprobs, prompt_logprobs, None, None, cached)

    def _finish_pooled(self, request: Request, result: ModelRunnerOutput) -> RequestDelta:
        """End a request whose prompt was all there is to compute."""
        if request.request_id not in result.pooled:
            raise RuntimeError(f"the runner made no vector for {request.request_id}, whose last token was computed")
        return self._finish(request, FinishReason.STOP, None, pooled=result.pooled[request.request_id])

    def _fail(self, request: Request, error: str) -> RequestDelta:
        """End one request whose computation went wrong; nobody may hit the blocks it wrote."""
        self._blocks.free(request, discard=True)
        return self._finish(request, FinishReason.ERROR, None, error=error)

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None, **gained: Any
    ) -> RequestDelta:
        """End a request and give back its blocks; its place in running or waiting is its caller's.

        gained: what its last delta brings, by the delta's names.
        """
        if request.status is not RequestStatus.WAITING:  # the runner has met it
            self._finished_ids.append(request.request_id)
        self._blocks.free(request)
        self._adapters.leave(request)
        if self._drafting is not None:
            self._drafting.forget(request.request_id)
        request.status = RequestStatus.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._requests[request.request_id]
        if request.parent_id is not None and self._leaders.get(request.parent_id) is request:
            del self._leaders[request.parent_id]
        self._counters.finished[reason] += 1
        return RequestDelta(
            request_id=request.request_id,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            **gained,
        )
