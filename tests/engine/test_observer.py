"""The observer, told of one event after another: which choice is where, and which times it had."""

from __future__ import annotations

import pytest
import torch

from octavo.core.backend.opset import OpChoice
from octavo.core.backend.specs import RowSpec
from octavo.core.base.metrics import Histogram
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.observer import Observer, RequestReport
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.engine.process import fallback_calls
from octavo.core.engine.wire import EngineRequest, StepFacts


class World:
    """An observer, and events in few words. Times are told, not taken."""

    def __init__(self) -> None:
        self.observer = Observer()
        self.figures = self.observer.figures

    def submit(
        self, name: str, at: float = 0.0, n: int = 1, adapter: str | None = None, report: RequestReport | None = None
    ) -> None:
        params = SamplingParams(n=n)
        request = EngineRequest(request_id=name, prompt_token_ids=[1] * 10, params=params, adapter=adapter)
        self.observer.submitted(request, at, report)

    def step(self, at: float, started: str = "", preempted: str = "") -> None:
        def names(text: str) -> list[tuple[str, int]]:
            return [(name[0], int(name[1:] or 0)) for name in text.split()]

        facts = StepFacts(began=at, num_tokens=5, started=names(started), preempted=names(preempted))
        self.observer.stepped(facts)

    def gain(self, name: str, at: float, tokens: int = 1, reason: FinishReason | None = None, index: int = 0) -> None:
        gained = CompletionOutput(index=index, token_ids=[7] * tokens, finish_reason=reason)
        piece = RequestOutput(name, None, [1] * 10, [gained], finished=reason is not None, num_cached_tokens=3)
        self.observer.took([piece], at)

    @property
    def places(self) -> tuple[int, int]:
        """Choices that run, and that wait."""
        return self.observer.num_running, self.observer.num_waiting


@pytest.fixture
def world() -> World:
    return World()


def test_the_times_of_a_choice(world: World) -> None:
    report = RequestReport()
    world.submit("a", at=1.0, report=report)
    world.step(at=3.0, started="a")
    world.gain("a", at=7.0)
    world.gain("a", at=8.0)
    world.gain("a", at=10.0, reason=FinishReason.LENGTH)
    (end,) = report.ends
    assert (end.queue_seconds, end.prefill_seconds, end.decode_seconds) == (2.0, 4.0, 3.0)
    assert (end.first_token_seconds, end.seconds) == (6.0, 9.0)
    assert (end.prompt_tokens, end.cached_tokens, end.generated_tokens) == (10, 3, 3)
    assert world.figures.inference_seconds.total == 7.0
    assert world.figures.per_token_seconds.total == 1.5
    assert world.figures.between_tokens_seconds.total == 3.0


def test_a_preempted_choice_waits_again_and_was_queued_once(world: World) -> None:
    world.submit("a", adapter="x")
    world.submit("b", adapter="x")
    assert world.places == (0, 2)
    world.step(at=1.0, started="a b")
    assert (world.places, world.observer.adapters_running) == ((2, 0), {"x": 2})
    world.step(at=2.0, preempted="b")
    assert (world.places, world.observer.adapters_waiting) == ((1, 1), {"x": 1})
    world.step(at=9.0, started="b")
    assert world.places == (2, 0)
    assert world.figures.queue_seconds.count == 2
    assert world.figures.queue_seconds.total == 2.0


def test_a_choice_that_is_dropped_leaves_nothing_wherever_it_is(world: World) -> None:
    world.submit("a", n=3, adapter="x")
    world.step(at=1.0, started="a0 a1")
    world.step(at=2.0, preempted="a1")
    world.observer.dropped([("a", index) for index in range(3)], FinishReason.ABORT, 3.0)
    assert world.places == (0, 0)
    assert not world.observer.adapters_running
    assert not world.observer.adapters_waiting
    assert world.figures.finished[FinishReason.ABORT] == 3
    assert world.figures.request_seconds.count == 0
    world.step(at=4.0, started="a2")
    world.gain("a", at=5.0, reason=FinishReason.STOP)
    world.observer.dropped([("a", 0)], FinishReason.ABORT, 6.0)
    assert sum(world.figures.finished.values()) == 3, "it ended once"
    assert world.places == (0, 0)


def test_what_the_engine_refuses_counts_nowhere(world: World) -> None:
    world.submit("a", n=2, adapter="x")
    world.submit("b")
    world.observer.refused("a")
    assert world.places == (0, 1)
    assert not world.observer.adapters_waiting
    assert sum(world.figures.finished.values()) == 0


def test_a_vector_has_no_tokens_and_no_decode_time(world: World) -> None:
    report = RequestReport()
    world.submit("a", report=report)
    world.step(at=1.0, started="a")
    world.gain("a", at=3.0, tokens=0, reason=FinishReason.STOP)
    (end,) = report.ends
    assert (end.prefill_seconds, end.decode_seconds, end.first_token_seconds) == (2.0, None, None)
    assert world.figures.prompt_tokens == 10
    assert world.figures.first_token_seconds.count == 0


def test_a_prompt_that_was_not_computed_does_not_count(world: World) -> None:
    for name, reason in (("a", FinishReason.ERROR), ("b", FinishReason.ABORT)):
        world.submit(name)
        world.step(at=1.0, started=name)
        world.gain(name, at=2.0, tokens=0, reason=reason)
    assert world.figures.prompt_tokens == 0
    assert world.figures.finished[FinishReason.ERROR] == world.figures.finished[FinishReason.ABORT] == 1


def test_calls_of_fallbacks_are_summed_by_op() -> None:
    spec = RowSpec(64, torch.float32)
    choices = [
        OpChoice("gemm", spec, "fallback", "why", 3),
        OpChoice("gemm", spec, "fallback", "why", 4),
        OpChoice("rope", spec, "fallback", "why", 0),
        OpChoice("embed", spec, "own", "", 0),
    ]
    assert fallback_calls(choices) == {"gemm": 7, "rope": 0}


def test_a_bound_belongs_to_the_range_that_it_ends() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert (histogram.count, histogram.total) == (5, 7.5)
