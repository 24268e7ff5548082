"""The executor of several ranks: a process for each, told the same, heard together, ended together.

                      ┌─ frames ──> rank 0   its part of the model; samples ──┐
    MultiprocExecutor ┼─ frames ──> rank 1   its part of the model            ├── one group: backend.communicator
                      └─ frames ──> rank …   its part of the model            ┘

The engine's process holds no device. So whatever becomes of a rank (killed, out of memory, stuck in a collective whose
partner is gone), the engine waits on sockets alone, with a deadline, and can end all of them: it then raises EngineDead
with the cause. A rank that lost another says so first; what counts is why the other was lost.
"""

from __future__ import annotations

import logging
import select
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from octavo.core.backend.opset import OpChoice
from octavo.core.base.child import ChildProcess, how_it_ended
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import CheckpointError, EngineDead, UserError
from octavo.core.base.logs import form_in_use
from octavo.core.engine import rank_messages as messages
from octavo.core.engine.messages import Failed, error_of
from octavo.core.lora.slots import AdapterFacts
from octavo.core.parallel.meeting import meeting_point
from octavo.core.parallel.mesh import Place
from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput

STEP_SECONDS = 600.0
"""How long a step may take: longer than ranks wait for each other, and than any kernel takes to build."""

LAST_WORDS_SECONDS = 1.0
"""How long the others may take to say what they know once one rank has failed."""

MODULE = "octavo.core.engine.rank_process"

Message = TypeVar("Message")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a rank.

    Attributes:
        failed: as the rank said it, or as it is to be said of it.
        weight: 0 a cause; 1 a silence; 2 what follows from another rank's end.
    """

    rank: int
    failed: Failed
    weight: int


class MultiprocExecutor:
    """Runs steps on `config.tensor_parallel_size` ranks. See Executor.

    Args:
        config: as the user gave it.
        model: the directory or file that config.model was found to be.
        step_seconds: how long a step may take.

    Raises:
        UserError: what every rank, or one of them, refuses to start with; nothing is left behind.
        EngineDead: a rank's process ended.
    """

    is_in_process = False

    def __init__(self, config: EngineConfig, model: Path, *, step_seconds: float = STEP_SECONDS) -> None:
        self._size = config.tensor_parallel_size
        self._step_seconds = step_seconds
        self._drawn: messages.Drawn = {}
        self._cause_of_end: str | None = None
        self._ranks: list[ChildProcess] = []
        try:
            with meeting_point() as address:
                self._start(_for_ranks(config, model), address)
                loaded = [_as(messages.Loaded, answer) for answer in self._answers(seconds=None)]
        except BaseException:
            self.close()
            raise
        first = loaded[0]
        self.sizes, self.vocab_size = first.sizes, first.vocab_size
        self.kv_groups, self.num_kv_blocks = first.kv_groups, first.num_kv_blocks
        self.first_adapters = first.first_adapters
        self._adapter_ids = {facts.adapter_id for facts in self.first_adapters.values()}
        if any(other != first for other in loaded):
            self.close()
            raise EngineDead("the ranks came to different sizes; they need devices and settings that are alike")

    @property
    def pids(self) -> list[int]:
        """The ranks' processes, in their order."""
        return [rank.pid for rank in self._ranks]

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on all ranks."""
        answers = self._ask(messages.Step(scheduled, self._drawn))
        output = messages.output_of(_as(messages.Stepped, answers[0]))
        self._drawn = {request_id: sampled.token_ids for request_id, sampled in output.sampled.items()}
        return output

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Rank 0's, which are those of all."""
        return messages.choices_of(_as(messages.OpsReport, self._ask(messages.ReportOps())[0]))

    def load_adapter(self, path: str) -> AdapterFacts:
        """See Executor: all ranks can use it, or none keeps it."""
        read = [_as(messages.AdapterRead, answer) for answer in self._ask(messages.LoadAdapter(path))]
        found = [each.facts for each in read if each.facts is not None]
        refused = [each.refused for each in read if each.refused is not None]
        if refused or any(facts != found[0] for facts in found):
            for adapter_id in {facts.adapter_id for facts in found} - self._adapter_ids:
                self._ask(messages.ForgetAdapter(adapter_id))
            if not refused:
                raise CheckpointError(f"the files of adapter {path} changed while they were read; load it again")
            raise error_of(refused[0])
        self._adapter_ids.add(found[0].adapter_id)
        return found[0]

    def forget_adapter(self, adapter_id: str) -> None:
        """See Executor."""
        self._adapter_ids.discard(adapter_id)
        self._ask(messages.ForgetAdapter(adapter_id))

    def watched(self) -> Sequence[int]:
        """See Executor."""
        return [rank.fileno() for rank in self._ranks]

    def check(self) -> None:
        """See Executor."""
        heard = [self._hear(rank, time.monotonic()) for rank in self._readable(range(len(self._ranks)), 0.0)]
        if faults := [fault for fault in heard if isinstance(fault, Fault)]:
            raise self._end(faults)

    def close(self) -> None:
        """End all ranks. Idempotent."""
        self._cause_of_end = self._cause_of_end or "the engine was closed"
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.hang_up()
        for rank in ranks:
            rank.stop()

    # -- the ranks --------------------------------------------------------------------------------------------

    def _start(self, config: EngineConfig, address: str) -> None:
        level = logging.getLogger("octavo").getEffectiveLevel()
        for rank in range(self._size):
            # On a terminal rank 0 writes by itself: a progress bar is not made of lines.
            child = ChildProcess(MODULE, keeps_log=rank > 0 or not sys.stderr.isatty(), holds_signals=True)
            self._ranks.append(child)
            # All come to the same warnings: one of them is enough to say so.
            shown = level if rank == 0 else logging.ERROR
            begin = messages.Begin(config, Place(rank, self._size, address), shown, form_in_use())
            with suppress(ConnectionError):  # it has ended already: its answer will tell
                child.send(messages.encode(begin))

    def _ask(self, message: messages.ToRank) -> list[messages.FromRank]:
        if self._cause_of_end is not None:
            raise EngineDead(self._cause_of_end)
        frame, deadline = messages.encode(message), time.monotonic() + self._step_seconds
        try:
            for rank in self._ranks:
                with suppress(ConnectionError, TimeoutError):  # its answer, or its silence, will tell
                    rank.send(frame, deadline)
            return self._answers(self._step_seconds)
        except KeyboardInterrupt:  # what they still answer would be taken for the answer to the next message
            self._cause_of_end = "the engine was interrupted while its ranks worked"
            raise

    def _answers(self, seconds: float | None) -> list[messages.FromRank]:
        """What each rank answers, in their order.

        Args:
            seconds: how long to wait; None for as long as all of them live.

        Raises:
            UserError, EngineDead: a rank failed, ended or did not answer; all are ended then.
        """
        began = time.monotonic()
        deadline = None if seconds is None else began + seconds
        answers: dict[int, messages.FromRank] = {}
        faults: list[Fault] = []
        waiting = set(range(self._size))
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = self._readable(waiting, left)
            if not ready:
                break
            for rank in ready:
                heard = self._hear(rank, deadline)
                if isinstance(heard, Fault):
                    faults.append(heard)
                else:
                    answers[rank] = heard
            waiting.difference_update(ready)
            if faults:
                soon = time.monotonic() + LAST_WORDS_SECONDS
                deadline = soon if deadline is None else min(deadline, soon)
        if faults or waiting:
            raise self._end([*faults, *(_silent(rank, time.monotonic() - began) for rank in sorted(waiting))])
        return [answers[rank] for rank in range(self._size)]

    def _readable(self, ranks: Collection[int], seconds: float | None) -> list[int]:
        """Those of the ranks that have said something, or ended."""
        poll, of_fileno = select.poll(), {}
        for rank in ranks:
            fileno = self._ranks[rank].fileno()
            of_fileno[fileno] = rank
            poll.register(fileno, select.POLLIN)
        ready = poll.poll(None if seconds is None else seconds * 1000)
        return sorted(of_fileno[fileno] for fileno, _ in ready)

    def _hear(self, rank: int, deadline: float | None) -> messages.FromRank | Fault:
        """A rank's message, which has begun to arrive."""
        child = self._ranks[rank]
        try:
            message = messages.decode_from_rank(child.receive(deadline))
        except ConnectionError:
            said = f"; it said last: {child.last_line}" if (code := child.stop()) and child.last_line else ""
            return Fault(rank, Failed("", f"{how_it_ended(code)}{said}", None), 0)
        except TimeoutError:
            return _silent(rank, self._step_seconds)
        if isinstance(message, Failed):
            is_effect = message.kind == "RankLost" or message.field == "address"
            return Fault(rank, message, 2 if is_effect else 0)
        return message

    def _end(self, faults: Sequence[Fault]) -> Exception:
        """End all ranks; returns the error that says why."""
        for rank in self._ranks:
            rank.end()
        error = self._error(faults)
        self._cause_of_end = str(error)
        self.close()
        return error

    def _error(self, faults: Sequence[Fault]) -> Exception:
        weightiest = min(fault.weight for fault in faults)
        causes = [fault for fault in faults if fault.weight == weightiest]
        failed = min(causes, key=lambda fault: fault.rank).failed
        if not failed.kind:
            alike = (fault.rank for fault in causes if fault.failed == failed)
            return EngineDead(f"{_names(alike)} of {self._size} {failed.message}")
        error = error_of(failed)
        if len(causes) == self._size and all(fault.failed == failed for fault in causes):
            return error if isinstance(error, UserError) else EngineDead(f"every rank failed: {_words(failed)}")
        name = f"rank {min(fault.rank for fault in causes)} of {self._size}"
        if isinstance(error, UserError):
            return type(error)(f"{name}: {error}", field=error.field)
        return EngineDead(f"{name} failed: {_words(failed)}")


def _for_ranks(config: EngineConfig, model: Path) -> EngineConfig:
    """The config as each rank gets it: the model where it was found, and a share of the threads."""
    threads = config.num_threads
    share = None if threads is None else max(1, threads // config.tensor_parallel_size)
    return replace(config, model=str(model), revision=None, num_threads=share)


def _silent(rank: int, seconds: float) -> Fault:
    return Fault(rank, Failed("", f"did not answer within {seconds:.1f} s", None), 1)


def _names(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0 and 1", …."""
    *first, last = sorted(ranks)
    return f"ranks {', '.join(map(str, first))} and {last}" if first else f"rank {last}"


def _words(failed: Failed) -> str:
    return f"{failed.kind}: {failed.message}" if failed.message else failed.kind


def _as(kind: type[Message], message: object) -> Message:
    """The message, which is of the kind that was asked for."""
    assert isinstance(message, kind), f"{kind.__name__} was asked for, {type(message).__name__} came"
    return message
