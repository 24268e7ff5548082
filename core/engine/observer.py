"""What becomes of requests, measured where they come in and go out: the figures behind /metrics, logs and traces.

    AsyncEngine ── submitted · stepped · took · refused · dropped ──► Observer ──┬── Figures        totals, for ever
                                                                                 └── RequestReport  of one call, for it

Times of a choice, all of one clock:

    submitted ── queue ── started ── prefill ── first token ── decode ── last token
              └──────────── first token ──────┘
              └──────────────────────── whole ────────────────────────┘

AsyncEngine owns the Observer and tells it; everybody else only reads. It holds a record of each live choice and no
record of any that ended, so it does not grow. Latencies are those of choices that came to their own end: a client that
leaves, or a choice that fails, would tell of itself and not of the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from octavo.core.base.metrics import Histogram
from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.engine.wire import EngineRequest, StepFacts

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
TOKENS = tuple(float(4**i) for i in range(11))
"""1 to a million."""
STEP_TOKENS = tuple(float(2**i) for i in range(15))
"""1 to 16,384."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEnd:
    """What one choice came to. Seconds that it did not live to see are None.

    Attributes:
        reason: why it ended.
        prompt_tokens, cached_tokens: of its prompt, and those of them that the prefix cache had.
        generated_tokens: of its reply.
        queue_seconds, prefill_seconds, decode_seconds: see the module's picture.
        first_token_seconds: from its submission.
        seconds: from its submission to its end.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    first_token_seconds: float | None
    seconds: float


@dataclass(slots=True)
class RequestReport:
    """What became of the requests of one call; filled in as they end, the aborted ones too.

    Attributes:
        prompt_tokens: each prompt once.
        adapter: that they run with; None: the base model.
    """

    prompt_tokens: int = 0
    adapter: str | None = None
    ends: list[ChoiceEnd] = field(default_factory=list)


@dataclass(slots=True)
class Figures:
    """Totals since the start. A choice counts by itself; prompts count once, when they have been computed."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    between_tokens_seconds: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    per_token_seconds: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))
    request_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    prefill_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    decode_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inference_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generated_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS))


@dataclass(slots=True)
class _Call:
    """What the choices of one request share."""

    submitted: float
    prompt_tokens: int
    adapter: str | None
    report: RequestReport | None
    is_counted: bool = False  # its prompt is


@dataclass(slots=True)
class _Choice:
    call: _Call
    is_running: bool = False
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    generated_tokens: int = 0


class Observer:
    """The measurements of one engine's front.

    Attributes:
        figures: totals; written here alone.
        adapters_running, adapters_waiting: live choices of each adapter, by its name.
        num_running: live choices that hold a place in the batch.
        fallback_calls: op -> calls of its fallbacks, as the engine last told.
    """

    def __init__(self) -> None:
        self.figures = Figures()
        self.adapters_running: Counter[str] = Counter()
        self.adapters_waiting: Counter[str] = Counter()
        self.num_running = 0
        self.fallback_calls: Mapping[str, int] = {}
        self._choices: dict[tuple[str, int], _Choice] = {}

    @property
    def num_waiting(self) -> int:
        """Live choices that hold no place: new ones, those still on their way to the engine, preempted ones."""
        return len(self._choices) - self.num_running

    def submitted(self, request: EngineRequest, since: float, report: RequestReport | None) -> None:
        """A request was checked and goes to the engine.

        Args:
            since: when its call came.
            report: to be filled in.
        """
        call = _Call(since, len(request.prompt_token_ids), request.adapter, report)
        if report is not None:
            report.prompt_tokens += call.prompt_tokens
            report.adapter = call.adapter
        for index in range(request.params.n):
            self._choices[request.request_id, index] = _Choice(call)
            if call.adapter is not None:
                self.adapters_waiting[call.adapter] += 1

    def stepped(self, step: StepFacts) -> None:
        """The engine made a step; to be told before what the step brought."""
        if step.num_tokens:
            self.figures.step_tokens.observe(step.num_tokens)
        for name in step.preempted:
            if (choice := self._choices.get(name)) is not None:
                self._set_running(choice, False)
        for name in step.started:
            if (choice := self._choices.get(name)) is not None:
                self._set_running(choice, True)
                if choice.started is None:
                    choice.started = max(step.began, choice.call.submitted)
                    self.figures.queue_seconds.observe(choice.started - choice.call.submitted)

    def fell_back(self, calls: Mapping[str, int]) -> None:
        """The engine tells how often ops had no implementation of the backend's own so far."""
        self.fallback_calls = calls

    def took(self, pieces: Iterable[RequestOutput], now: float) -> None:
        """Pieces of replies came from the engine."""
        for piece in pieces:
            for gained in piece.outputs:
                if (choice := self._choices.get((piece.request_id, gained.index))) is not None:
                    self._gain(choice, gained, now)
                    if gained.finish_reason is not None:
                        self._end((piece.request_id, gained.index), gained.finish_reason, piece.num_cached_tokens, now)

    def refused(self, request_id: str) -> None:
        """The engine turned a request away: nothing of it ran, and it counts nowhere."""
        index = 0
        while (choice := self._choices.pop((request_id, index), None)) is not None:
            self._forget(choice)
            index += 1

    def dropped(self, choices: Iterable[tuple[str, int]], reason: FinishReason, now: float) -> None:
        """Nobody waits for these any more; those that ended before are passed over."""
        for name in choices:
            if name in self._choices:
                self._end(name, reason, 0, now)

    def _gain(self, choice: _Choice, gained: CompletionOutput, now: float) -> None:
        figures, count = self.figures, len(gained.token_ids)
        ended_by_itself = gained.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not choice.call.is_counted and (count or ended_by_itself):
            choice.call.is_counted = True
            figures.prompt_tokens += choice.call.prompt_tokens
        if not count:
            return
        figures.generated_tokens += count
        choice.generated_tokens += count
        if choice.first is not None:
            figures.between_tokens_seconds.observe(now - choice.last)
        else:
            choice.first = now
            figures.first_token_seconds.observe(now - choice.call.submitted)
        choice.last = now

    def _end(self, name: tuple[str, int], reason: FinishReason, cached_tokens: int, now: float) -> None:
        choice = self._choices.pop(name)
        self._forget(choice)
        self.figures.finished[reason] += 1
        end = _end_of(choice, reason, cached_tokens, now)
        if choice.call.report is not None:
            choice.call.report.ends.append(end)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._observe(end)

    def _observe(self, end: ChoiceEnd) -> None:
        figures = self.figures
        figures.request_seconds.observe(end.seconds)
        figures.request_prompt_tokens.observe(end.prompt_tokens)
        figures.request_generated_tokens.observe(end.generated_tokens)
        if end.queue_seconds is not None:
            figures.inference_seconds.observe(end.seconds - end.queue_seconds)
        if end.prefill_seconds is not None:
            figures.prefill_seconds.observe(end.prefill_seconds)
        if end.decode_seconds is not None:
            figures.decode_seconds.observe(end.decode_seconds)
            if end.generated_tokens > 1:
                figures.per_token_seconds.observe(end.decode_seconds / (end.generated_tokens - 1))

    def _forget(self, choice: _Choice) -> None:
        """A choice ended: it neither runs nor waits."""
        self._set_running(choice, False)
        if choice.call.adapter is not None:
            _count_down(self.adapters_waiting, choice.call.adapter)

    def _set_running(self, choice: _Choice, is_running: bool) -> None:
        if choice.is_running is is_running:
            return
        choice.is_running = is_running
        self.num_running += 1 if is_running else -1
        if (adapter := choice.call.adapter) is not None:
            came, left = self.adapters_running, self.adapters_waiting
            if not is_running:
                came, left = left, came
            came[adapter] += 1
            _count_down(left, adapter)


def _end_of(choice: _Choice, reason: FinishReason, cached_tokens: int, now: float) -> ChoiceEnd:
    submitted, started, first = choice.call.submitted, choice.started, choice.first
    computed = first  # when its prompt was
    if computed is None and reason in (FinishReason.STOP, FinishReason.LENGTH):
        computed = now  # a vector, or no tokens were wanted
    return ChoiceEnd(
        reason=reason,
        prompt_tokens=choice.call.prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=choice.generated_tokens,
        queue_seconds=None if started is None else started - submitted,
        prefill_seconds=None if started is None or computed is None else computed - started,
        decode_seconds=None if first is None else choice.last - first,
        first_token_seconds=None if first is None else first - submitted,
        seconds=now - submitted,
    )


def _count_down(counts: Counter[str], key: str) -> None:
    """Count one less; a key without any is dropped."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
