"""The scheduler's seams: who is next, how much it gets, when it may start, who gives way.

    TokenLimit.cap(request, n, budget)      the chunk of a request that has n tokens to compute
    AdmissionGate.may_start(request)        why a waiting request must wait though there is room, or None

Features enter here and leave `schedule()` alone. Both are queries: they mutate nothing, and are asked for the same
request again in later steps. What a gate reads (a compiled grammar, a loaded adapter) changes on its owner's side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.core.base.errors import ConfigError
from octavo.core.sched.request import Request, RequestStatus


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a request has to wait, in words for logs and metrics."""

    text: str


class TokenLimit(Protocol):
    """Caps what one request computes in one step: chunk size, fairness, alignment."""

    def cap(self, request: Request, n: int, budget: int) -> int:
        """At most n, the tokens that `request` would compute; budget tokens are left in the step. 0 skips it."""
        ...


class AdmissionGate(Protocol):
    """Holds back waiting requests; those behind them go on."""

    def may_start(self, request: Request) -> Reason | None:
        """None when the request may start in this step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What bounds a step and a request.

    Attributes:
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step, at least max_num_seqs: every running request gets one per step.
        max_model_len: tokens of a prompt and its reply.
        policy: "fcfs", or "priority" (lower value first).
        priority_ageing_s: under "priority", one level outweighs this many seconds of earlier arrival, so that no
            level waits for ever; None makes levels strict.
        long_prefill_threshold: the most tokens of one request in one step; None leaves it to the budget.
        admission_headroom: share of the KV pool that starting a request must leave free while others run, so that
            their growth does not preempt it at once.
        rotary_switch_tokens: requests that compute more tokens than this have positions of their own kind, for models
            whose rotary frequencies depend on a request's length; None: all requests have the same.
        max_adapters: different adapters that run at once; None: as many as come.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    policy: str = "fcfs"
    priority_ageing_s: float | None = 60.0
    long_prefill_threshold: int | None = None
    admission_headroom: float = 0.02
    rotary_switch_tokens: int | None = None
    max_adapters: int | None = None

    def __post_init__(self) -> None:
        counts = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "long_prefill_threshold", "max_adapters")
        for name in counts:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is {value}; give at least 1", field=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs {self.max_num_seqs}; "
                "raise it, so that every running request gets a token in every step",
                field="max_num_batched_tokens",
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy is {self.policy!r}; give fcfs or priority", field="policy")
        if self.priority_ageing_s is not None and not 0 < self.priority_ageing_s < float("inf"):
            raise ConfigError(
                f"priority_ageing_s is {self.priority_ageing_s}; give seconds above 0, or None for strict levels",
                field="priority_ageing_s",
            )
        if not 0.0 <= self.admission_headroom < 1.0:
            raise ConfigError(
                f"admission_headroom is {self.admission_headroom}; give a share in [0, 1)", field="admission_headroom"
            )


def rank_of(request: Request, limits: SchedulerLimits) -> float:
    """First half of Request.order; the order of arrival decides between equals.

    It never changes while a request lives: only finitely many requests can rank before any given one (arrival times
    grow), which is why ageing needs no clock here.
    """
    if limits.policy == "fcfs":
        return 0.0
    if limits.priority_ageing_s is None:
        return float(request.priority)
    return request.arrival_time + request.priority * limits.priority_ageing_s


def victim_for(running: Sequence[Request], request: Request) -> Request | None:
    """Which of `running` (sorted by order) gives way so that the waiting `request` can start; None: nobody does.

    Only a lower priority gives way to a start; under fcfs all are equal. (For the growth of a running request the
    last one always gives way, be it that request itself: the first one is never preempted, hence no starvation.)
    """
    if not running:
        return None
    last = running[-1]
    return last if last.order[0] > request.order[0] and last.priority > request.priority else None


@dataclass(frozen=True, slots=True)
class LongPrefillLimit:
    """TokenLimit: no request computes more than `threshold` tokens in one step."""

    threshold: int

    def cap(self, request: Request, n: int, budget: int) -> int:
        """See TokenLimit."""
        return min(n, self.threshold)


class WholePromptLimit:
    """TokenLimit: a request computes all its tokens in one step or waits, for models that keep nothing between steps.

    It ends only where a step holds the longest request (max_num_batched_tokens >= max_model_len) and no other limit
    cuts chunks.
    """

    def cap(self, request: Request, n: int, budget: int) -> int:
        """See TokenLimit."""
        return n if n == request.num_tokens - request.num_computed_tokens else 0


class SiblingGate:
    """AdmissionGate: choices of one parent wait until the first has computed the prompt, then share its blocks.

    Args:
        leaders: parent id -> the live first choice; the scheduler's, read only here.
    """

    def __init__(self, leaders: Mapping[str, Request]) -> None:
        self._leaders = leaders

    def may_start(self, request: Request) -> Reason | None:
        """See AdmissionGate. A leader that ended holds nobody back; a preempted one is before its siblings."""
        leader = leader_of(request, self._leaders)
        if leader is None or leader.order > request.order:
            return None
        if leader.status is RequestStatus.RUNNING and leader.num_computed_tokens >= leader.num_prompt_tokens:
            return None
        return Reason(f"{leader.request_id} is computing the prompt")


class SharedPrefixGate:
    """AdmissionGate: a request waits while an earlier running one computes blocks that its prompt begins with.

    It waits for earlier requests only, and every running request advances in every step, so nobody waits for ever.

    Args:
        computing: request -> the running request that is computing the next blocks of its prompt, if any.
    """

    def __init__(self, computing: Callable[[Request], Request | None]) -> None:
        self._computing = computing

    def may_start(self, request: Request) -> Reason | None:
        """See AdmissionGate."""
        other = self._computing(request)
        if other is None or other.order > request.order:
            return None
        return Reason(f"{other.request_id} is computing its prefix")


def leader_of(request: Request, leaders: Mapping[str, Request]) -> Request | None:
    """The live first choice that `request` is a sibling of."""
    if request.parent_id is None:
        return None
    leader = leaders.get(request.parent_id)
    return None if leader is request else leader
