"""Whether guesses pay: seconds per token of the steps with them against the steps without, as measured.

    requests in a step (powers of two) ── with drafts     seconds per token, a running mean
                                       └─ without         the same

A guess costs what a row of logits costs, which is little where a step waits for memory (few requests) and as much as a
token where it waits for arithmetic (many). No figure of the machine says where that changes as well as a clock does.
The worse kind is tried again now and then, because texts change.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput

WEIGHT = 1 / 16
"""Of the latest step in a running mean."""

PROBE_STEPS = 64
"""Steps after which the worse kind gets another try."""

ENOUGH_STEPS = 8
"""Steps of each kind before they are compared."""


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(WEIGHT, 1 / self.count) * (value - self.value)


@dataclass(slots=True)
class _Arms:
    """Both kinds of steps of one size; since_probe counts steps without since the last one with."""

    drafted: _Mean = field(default_factory=_Mean)
    plain: _Mean = field(default_factory=_Mean)
    since_probe: int = 0


class DraftPayoff:
    """Owned by the engine, which times its steps; the scheduler asks allows()."""

    def __init__(self) -> None:
        self._arms: dict[int, _Arms] = {}

    def allows(self, num_requests: int) -> bool:
        """Whether a step of so many requests may carry guesses."""
        arms = self._arms.get(num_requests.bit_length())
        if arms is None or arms.drafted.count < ENOUGH_STEPS:
            return True
        if arms.plain.count < ENOUGH_STEPS:
            return False
        # Where guesses pay, steps without are met all the same: whenever nobody has one.
        return arms.drafted.value <= arms.plain.value or arms.since_probe >= PROBE_STEPS

    def saw(self, scheduled: SchedulerOutput, result: ModelRunnerOutput, seconds: float) -> None:
        """A step took so long. Only those count in which every request drew and nothing else was computed."""
        num_requests = len(scheduled.num_scheduled_tokens)
        num_drafted = sum(map(len, scheduled.drafts.values()))
        num_computed = scheduled.total_num_scheduled_tokens - num_drafted
        if not 0 < num_requests == num_computed == len(result.sampled):
            return
        arms = self._arms.setdefault(num_requests.bit_length(), _Arms())
        num_tokens = sum(len(sampled.token_ids) for sampled in result.sampled.values())
        (arms.drafted if num_drafted else arms.plain).add(seconds / num_tokens)
        arms.since_probe = 0 if num_drafted else arms.since_probe + 1
