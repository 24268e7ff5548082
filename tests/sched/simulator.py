"""A model runner without a model: it keeps what each KV slot would hold, and checks what each query would see.

The content of a slot is named by everything that decides it: the whole prefix, adapter and salt. The simulator knows
only what SchedulerOutput tells it, as a real runner does. In every step it demands that each KV entry that a query
can see is the right one, in every group, so that a wrong hit, a missed copy, a block freed too early or written
twice shows at once. The token it draws is a function of that content, so replies can be predicted (`reply_alone`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.cache_observer import CacheObserver
from octavo.core.sched.drafting import Drafting
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, NewRequest, RequestDelta, SampledTokens, SchedulerOutput
from octavo.core.sched.policy import SchedulerLimits
from octavo.core.sched.request import Request
from octavo.core.sched.scheduler import Scheduler

VOCAB_SIZE = 4
EOS = 0


def root_name(adapter_id: str | None, cache_salt: str | None) -> int:
    return zlib.crc32(repr((adapter_id, cache_salt)).encode())


def next_name(name: int, token_id: int) -> int:
    """The content of the slot after `name` that holds token_id."""
    return hash((name, token_id))


def draw(name: int, choice_index: int) -> int:
    """The token drawn after a prefix of this name; EOS one time in thirty-two."""
    value = hash((name, choice_index, 7)) >> 3
    return EOS if value % 32 == 0 else 1 + value % (VOCAB_SIZE - 1)


class Guesser:
    """A Drafter that often knows what the simulator will draw; in every so many tokens it is wrong."""

    def __init__(self, wrong_one_in: int) -> None:
        self._wrong_one_in = wrong_one_in
        self.known: set[str] = set()

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        self.known.add(request.request_id)
        name = root_name(request.adapter_id, request.cache_salt)
        for token_id in request.token_ids:
            name = next_name(name, token_id)
        guesses = []
        for _ in range(num_tokens):
            guess = draw(name, request.choice_index)
            if hash((name, 5)) % self._wrong_one_in == 0:
                guess = 1 + guess % (VOCAB_SIZE - 1)
            guesses.append(guess)
            name = next_name(name, guess)
        return tuple(guesses)

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


def reply_alone(request: Request) -> tuple[list[int], FinishReason]:
    """What `request` must be answered, whatever shares its batch: computed without scheduler or cache."""
    name = root_name(request.adapter_id, request.cache_salt)
    for token_id in request.prompt_token_ids:
        name = next_name(name, token_id)
    reply: list[int] = []
    while len(reply) < request.max_tokens:
        reply.append(draw(name, request.choice_index))
        name = next_name(name, reply[-1])
        ends = reply[-1] in request.sampling.stop_token_ids or (reply[-1] == EOS and not request.sampling.ignore_eos)
        if ends and len(reply) > request.sampling.min_tokens:
            return reply, FinishReason.STOP
    return reply, FinishReason.LENGTH


@dataclass
class Row:
    """What the runner knows of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    choice_index: int
    tables: list[list[int]]
    names: list[int]
    max_tokens: int | None
    needs_prompt_logprobs: bool
    num_computed_tokens: int
    positions_computed: set[int] = field(default_factory=set)


class KVSimulator:
    """Runs SchedulerOutputs over simulated KV contents."""

    def __init__(self, groups: Sequence[KVGroupSpec]) -> None:
        self.groups = groups
        self.salts: dict[str, str | None] = {}
        self.fail_next: set[str] = set()
        self.rows: dict[str, Row] = {}
        self._slots: dict[int, dict[int, tuple[int, int]]] = {}

    def run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """One step, or an AssertionError."""
        self._apply_differences(scheduled)
        for source, target in scheduled.block_copies:
            assert 0 not in (source, target)
            self._slots[target] = dict(self._slots.get(source, {}))
        assert sum(scheduled.num_scheduled_tokens.values()) == scheduled.total_num_scheduled_tokens
        self._write(scheduled)
        result = ModelRunnerOutput()
        for request_id, count in scheduled.num_scheduled_tokens.items():
            row = self.rows[request_id]
            drafts = scheduled.drafts.get(request_id, ())
            self._check_visible(request_id, row, count, self._names_with(row, drafts))
            self._answer(request_id, row, row.num_computed_tokens + count - len(drafts), drafts, result)
        return result

    def _apply_differences(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_request_ids + scheduled.preempted_request_ids:
            self.rows.pop(request_id, None)
        for new in scheduled.new_requests:
            assert new.request_id not in self.rows, "a new request has a row already"
            assert new.request_id in scheduled.num_scheduled_tokens
            self.rows[new.request_id] = self._row_of(new)
        for running in scheduled.running:
            row = self.rows[running.request_id]
            row.num_computed_tokens = running.num_computed_tokens
            for table, new_ids in zip(row.tables, running.new_block_ids, strict=True):
                table.extend(new_ids)

    def _row_of(self, new: NewRequest) -> Row:
        row = Row(
            token_ids=list(new.token_ids),
            num_prompt_tokens=new.num_prompt_tokens,
            choice_index=new.choice_index,
            tables=[list(ids) for ids in new.block_ids],
            names=[root_name(new.adapter_id, self.salts.get(new.request_id))],
            max_tokens=new.sampling.max_tokens,
            needs_prompt_logprobs=new.needs_prompt_logprobs,
            num_computed_tokens=new.num_computed_tokens,
        )
        self._name_tokens(row)
        return row

    def _name_tokens(self, row: Row) -> None:
        """names[p + 1] is the content of position p."""
        for token_id in row.token_ids[len(row.names) - 1 :]:
            row.names.append(next_name(row.names[-1], token_id))

    def _write(self, scheduled: SchedulerOutput) -> None:
        writer: dict[int, str] = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start = row.num_computed_tokens
            assert count > 0
            drafts = scheduled.drafts.get(request_id, ())
            assert start + count <= len(row.token_ids) + len(drafts)
            names = self._names_with(row, drafts)
            for group, table in zip(self.groups, row.tables, strict=True):
                for position in range(start, start + count):
                    block_id = table[position // group.block_size]
                    assert block_id != 0, "the null block is written"
                    key = f"{request_id} group {group.group_id}"
                    assert writer.setdefault(block_id, key) == key, "two requests write one block"
                    content = (group.group_id, names[position + 1])
                    self._slots.setdefault(block_id, {})[position % group.block_size] = content
            row.positions_computed.update(range(start, start + count))

    def _names_with(self, row: Row, drafts: Sequence[int]) -> list[int]:
        """names, and the content of guesses behind the row's tokens."""
        names = list(row.names)
        for token_id in drafts:
            names.append(next_name(names[-1], token_id))
        return names

    def _check_visible(self, request_id: str, row: Row, count: int, names: Sequence[int]) -> None:
        start = row.num_computed_tokens
        for group, table in zip(self.groups, row.tables, strict=True):
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, start + count):
                found = self._slots.get(table[position // group.block_size], {}).get(position % group.block_size)
                assert found == (group.group_id, names[position + 1]), (
                    f"{request_id}: a query at {start} or later sees a wrong entry at {position} of {group}"
                )

    def _answer(self, request_id: str, row: Row, end: int, drafts: Sequence[int], result: ModelRunnerOutput) -> None:
        if request_id in self.fail_next:
            self.fail_next.discard(request_id)
            result.failed[request_id] = "made to fail"
            return
        if end == row.num_prompt_tokens and row.needs_prompt_logprobs:
            assert row.positions_computed >= set(range(end)), "a position of the prompt was skipped"
            result.prompt_logprobs[request_id] = end
            row.needs_prompt_logprobs = False
        if end == len(row.token_ids) and row.max_tokens != 0:
            drawn: list[int] = []
            while len(drawn) <= len(drafts) and drawn == list(drafts[: len(drawn)]):
                drawn.append(draw(row.names[-1], row.choice_index))
                row.token_ids.append(drawn[-1])
                self._name_tokens(row)
            result.sampled[request_id] = SampledTokens(tuple(drawn), None)
        else:
            assert not drafts, "guesses for a request that draws nothing"


class Harness:
    """Scheduler, block manager and simulator, and what each request has been answered so far."""

    def __init__(
        self,
        groups: Sequence[KVGroupSpec],
        num_blocks: int,
        limits: SchedulerLimits,
        *,
        enable_prefix_caching: bool = True,
        observer: CacheObserver | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self.blocks = BlockManager(
            num_blocks, groups, enable_prefix_caching=enable_prefix_caching, kv_dtype="float32", observer=observer
        )
        self.scheduler = Scheduler(limits, self.blocks, drafting=drafting)
        self.runner = KVSimulator(groups)
        self.requests: dict[str, Request] = {}
        self.replies: dict[str, list[int]] = {}
        self.ended: dict[str, RequestDelta] = {}
        self.prompt_logprobs: dict[str, int] = {}

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.replies[request.request_id] = []
        self.runner.salts[request.request_id] = request.cache_salt
        return request

    def step(self) -> SchedulerOutput:
        scheduled = self.scheduler.schedule()
        self.blocks.check_integrity()
        result = self.runner.run(scheduled)
        self.note(self.scheduler.update(scheduled, result))
        self.blocks.check_integrity()
        return scheduled

    def note(self, deltas: Sequence[RequestDelta]) -> None:
        """Keep what deltas say, and check that nothing follows a request's end."""
        for delta in deltas:
            assert delta.request_id not in self.ended
            self.replies[delta.request_id].extend(delta.new_token_ids)
            if delta.prompt_logprobs is not None:
                assert delta.request_id not in self.prompt_logprobs, "prompt logprobs came twice"
                self.prompt_logprobs[delta.request_id] = delta.prompt_logprobs
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta

    def drain(self) -> int:
        """Run until nothing is left; returns the number of steps.

        The first running request advances in every step and keeps what it has, so no more steps are needed than all
        live requests have tokens; twice that allows for those that give way to more urgent ones.
        """
        live = [request for request_id, request in self.requests.items() if request_id not in self.ended]
        max_steps = 2 * sum(request.num_prompt_tokens + request.max_tokens for request in live)
        for count in range(max_steps):
            if not self.scheduler.has_unfinished():
                return count
            assert self.step().total_num_scheduled_tokens > 0, "requests wait, and nothing is computed"
        assert not self.scheduler.has_unfinished(), f"still unfinished after {max_steps} steps"
        return max_steps

    def check_replies(self) -> None:
        """Every request that ended by itself was answered as it would be alone."""
        for request_id, delta in self.ended.items():
            expected, reason = reply_alone(self.requests[request_id])
            got = self.replies[request_id]
            if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert (got, delta.finish_reason) == (expected, reason)
            else:
                assert got == expected[: len(got)]
