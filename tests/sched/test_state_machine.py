"""Random histories over Scheduler and BlockManager, with every visible KV entry checked in every step.

`make test` runs tens of thousands of steps; OCTAVO_NIGHTLY=1 runs millions.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.base.errors import NeverFits
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.sched.drafting import Drafting
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request
from tests.sched.simulator import EOS, VOCAB_SIZE, Guesser, Harness

NIGHTLY = os.environ.get("OCTAVO_NIGHTLY") == "1"
MAX_MODEL_LEN = 64

GROUPS = st.sampled_from(
    [
        ((4, None),),
        ((1, None),),
        ((4, 6),),
        ((4, 1),),
        ((4, None), (4, 5)),
        ((4, 8), (4, None), (4, 8)),
        ((2, None), (4, None), (3, 7)),
        ((3, 4), (2, 9)),
    ]
)
TOKENS = st.integers(1, VOCAB_SIZE - 1)
PROMPTS = st.one_of(
    st.lists(TOKENS, min_size=1, max_size=12),
    # Long prompts that share beginnings.
    st.builds(lambda length, tail: [1] * length + tail, st.integers(3, 30), st.lists(TOKENS, min_size=1, max_size=3)),
)


class SchedulerMachine(RuleBasedStateMachine):
    harness: Harness

    @initialize(
        groups=GROUPS,
        num_blocks=st.integers(6, 30),
        max_num_seqs=st.integers(1, 8),
        extra_tokens=st.integers(0, 30),
        policy=st.sampled_from(["fcfs", "priority"]),
        ageing=st.sampled_from([None, 1.0, 60.0]),
        threshold=st.sampled_from([None, 1, 5]),
        headroom=st.sampled_from([0.0, 0.1]),
        caching=st.sampled_from([True, True, True, False]),
        guesses=st.sampled_from([0, 0, 1, 5]),
        wrong_one_in=st.sampled_from([1, 2, 5]),
    )
    def build(
        self, groups, num_blocks, max_num_seqs, extra_tokens, policy, ageing, threshold, headroom, caching, guesses,
        wrong_one_in,
    ):  # fmt: skip
        specs = tuple(KVGroupSpec(i, size, window, 1) for i, (size, window) in enumerate(groups))
        limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            max_model_len=MAX_MODEL_LEN,
            policy=policy,
            priority_ageing_s=ageing,
            long_prefill_threshold=threshold,
            admission_headroom=headroom,
        )
        self.limits = limits
        self.guesser = Guesser(wrong_one_in)
        self.harness = Harness(
            specs, num_blocks, limits, enable_prefix_caching=caching, observer=self.observer(specs),
            drafting=Drafting(self.guesser, max_tokens=guesses, max_rows=max_num_seqs + 3) if guesses else None,
        )  # fmt: skip
        self.count = 0

    def observer(self, groups):
        """Who hears of the cache's changes; machines that inherit from this one may have somebody."""

    @rule(
        prompt=PROMPTS,
        copies=st.integers(1, 5),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priorities=st.lists(st.integers(-1, 2), min_size=5, max_size=5),
        max_tokens=st.one_of(st.none(), st.integers(0, 16)),
        min_tokens=st.sampled_from([0, 0, 4]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        stops=st.sampled_from([{}, {}, {"stop_token_ids": (2,)}, {"ignore_eos": True}]),
        adapter_id=st.sampled_from([None, None, "a"]),
        cache_salt=st.sampled_from([None, None, "a", "b"]),
    )
    def add(self, prompt, copies, n, priorities, max_tokens, min_tokens, prompt_logprobs, stops, **keys):
        for tail in range(copies):
            parent_id = f"r{self.count}"
            self.count += 1
            for i in range(n):
                params = SamplingParams(
                    max_tokens=max_tokens,
                    min_tokens=min(min_tokens, max_tokens or 0),
                    prompt_logprobs=prompt_logprobs if i == 0 else None,
                    **stops,
                )
                self.try_add(
                    Request(
                        f"{parent_id}#{i}",
                        prompt + [1 + tail % 2] * (tail // 2),
                        params,
                        choice_index=i,
                        parent_id=parent_id if n > 1 else None,
                        eos_token_ids=frozenset({EOS}),
                        priority=priorities[tail],
                        arrival_time=float(self.count),
                        **keys,
                    )
                )

    def try_add(self, request):
        try:
            self.harness.add(request)
        except NeverFits:
            longest = self.harness.blocks.longest_request(MAX_MODEL_LEN)
            last_output = 1 if request.sampling.max_tokens else 0
            assert request.num_prompt_tokens + (request.sampling.max_tokens or 0) - last_output > longest

    @rule(count=st.integers(1, 40))
    def steps(self, count):
        for _ in range(count):
            if self.harness.scheduler.has_unfinished():
                assert self.harness.step().total_num_scheduled_tokens > 0
                assert self.harness.scheduler.num_running <= self.limits.max_num_seqs

    @precondition(lambda self: self.harness.scheduler.has_unfinished())
    @rule(data=st.data(), in_flight=st.booleans())
    def abort(self, data, in_flight):
        live = sorted(set(self.harness.requests) - set(self.harness.ended))
        chosen = data.draw(st.sets(st.sampled_from(live), min_size=1, max_size=2))
        scheduler = self.harness.scheduler
        scheduled = scheduler.schedule() if in_flight else None
        deltas = scheduler.abort([*chosen, "nobody"])
        assert {delta.request_id for delta in deltas} == chosen
        self.harness.note(deltas)
        if scheduled is not None:
            self.harness.note(scheduler.update(scheduled, self.harness.runner.run(scheduled)))

    @precondition(lambda self: self.harness.scheduler.num_running)
    @rule(data=st.data())
    def fail(self, data):
        self.harness.runner.fail_next.add(data.draw(st.sampled_from(sorted(self.harness.runner.rows))))
        self.harness.step()
        self.harness.runner.fail_next.clear()

    @rule()
    def reset_cache(self):
        self.harness.blocks.reset_prefix_cache()

    @invariant()
    def sound(self):
        if hasattr(self, "harness"):
            self.harness.blocks.check_integrity()

    def teardown(self):
        if not hasattr(self, "harness"):
            return
        self.harness.drain()
        self.harness.check_replies()
        assert self.harness.blocks.num_used_blocks == 0
        assert self.guesser.known == set()
        scored = {
            request_id
            for request_id, delta in self.harness.ended.items()
            if self.harness.requests[request_id].sampling.prompt_logprobs is not None
            and delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        }
        assert scored <= self.harness.prompt_logprobs.keys()


SchedulerMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("OCTAVO_NIGHTLY_HISTORIES", "30000")) if NIGHTLY else 250,
    stateful_step_count=40,
    derandomize=not NIGHTLY,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestRandomHistories = pytest.mark.timeout(6 * 3600 if NIGHTLY else 120)(SchedulerMachine.TestCase)
