"""The engine: one scheduler, one executor, one step at a time. It knows token ids and no text.

    add_request ─┐                                     ┌─> list[EngineOutput]
    abort ───────┴─> Scheduler ──> Executor ──> Scheduler.update
                        step():  schedule      execute       update

Owned by whoever drives the loop: `LLM` in the caller's thread, `process.py` in an engine process. Not thread-safe.
A request of n choices becomes n scheduler requests; all else about choices is the scheduler's. A step that does not
come to its end (an error, Ctrl-C) leaves scheduler and device apart: the engine is dead from then on and says why.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Self

from octavo.core.backend.opset import OpChoice
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import EngineDead, InvalidRequest
from octavo.core.base.lora import AdapterInfo
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason
from octavo.core.engine.adapter_book import AdapterBook
from octavo.core.engine.draft_payoff import DraftPayoff
from octavo.core.engine.executor import Executor, make_executor
from octavo.core.engine.grammars import Grammars
from octavo.core.engine.kv_events.publisher import Publisher
from octavo.core.engine.kv_events.stream import KVEventStream, open_publisher
from octavo.core.engine.prompt_lookup import PromptLookup
from octavo.core.engine.prompt_scores import PromptLogprobsLimit
from octavo.core.engine.wire import EngineOutput, EngineRequest, StepFacts, choice_id, split_choice_id
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.sched.block_manager import BlockManager
from octavo.core.sched.block_map import BlockMap
from octavo.core.sched.drafting import Drafting
from octavo.core.sched.output import RequestDelta, SchedulerOutput
from octavo.core.sched.policy import SchedulerLimits, WholePromptLimit
from octavo.core.sched.request import Request
from octavo.core.sched.scheduler import Scheduler


class Engine:
    """Serves token-id requests step by step.

    Args:
        config: the scheduler's policies and the seed.
        executor: ready to run; the engine closes it.
        publisher: of KV events; the engine closes it, too.

    Attributes:
        sizes: of a step and a request.
        vocab_size: valid token ids are below it.
        num_kv_blocks: blocks of the KV cache.
        adapters: the low-rank adapters that requests may name.
    """

    def __init__(self, config: EngineConfig, executor: Executor, publisher: Publisher | None = None) -> None:
        self._executor = executor
        # By a lambda: the adapters are known only below.
        self._kv_events = (
            None if publisher is None else KVEventStream(publisher, lambda content: self.adapters.name_of(content))
        )
        self.sizes = sizes = executor.sizes
        self.vocab_size = executor.vocab_size
        self.num_kv_blocks = executor.num_kv_blocks
        self._blocks = BlockManager(
            num_blocks=executor.num_kv_blocks,
            groups=executor.kv_groups,
            enable_prefix_caching=config.enable_prefix_caching and not sizes.whole_texts,
            kv_dtype=str(sizes.kv_dtype),
            observer=None if self._kv_events is None else self._kv_events.recorder,
        )
        limits = SchedulerLimits(
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
            policy=config.scheduling_policy,
            long_prefill_threshold=None if sizes.whole_texts else config.long_prefill_threshold,
            rotary_switch_tokens=sizes.rotary_switch_tokens,
            max_adapters=config.max_loras if config.serves_adapters else None,
        )
        token_limit = WholePromptLimit() if sizes.whole_texts else PromptLogprobsLimit()
        self._grammars = Grammars(config)
        self._payoff = DraftPayoff()
        self._scheduler = Scheduler(
            limits, self._blocks, token_limits=(token_limit,), gates=(self._grammars.book,),
            drafting=self._drafting(config.num_speculative_tokens),
        )  # fmt: skip
        first = [
            AdapterInfo(name=name, path=config.lora_modules[name], **asdict(facts))
            for name, facts in executor.first_adapters.items()
        ]
        self.adapters = AdapterBook(executor, is_enabled=config.serves_adapters, first=first)
        self._seeds = random.Random(config.seed)
        self._dead: str | None = None
        self._last_step: StepFacts | None = None

    @classmethod
    def from_checkpoint(cls, config: EngineConfig, checkpoint: Checkpoint) -> Self:
        """Load a model and make its engine.

        Raises:
            UserError: the backend, the checkpoint or the memory budget is at fault; nothing is left behind.
            EngineDead: a process of a rank ended.
        """
        with ExitStack() as undo:
            if (publisher := open_publisher(config)) is not None:  # first: an address that is taken is told at once
                undo.callback(publisher.close)
            executor = make_executor(config, checkpoint)
            undo.callback(executor.close)
            engine = cls(config, executor, publisher)
            undo.pop_all()
            return engine

    def add_request(self, request: EngineRequest) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: it can't run here (too long, never fits the KV pool, an id in use, an unknown adapter);
                nothing of it stays.
            EngineDead: the engine was closed, or a step failed.
        """
        self._check_alive()
        params = request.params
        if (request.pooling is not None) is not self.sizes.gives_vectors:
            kind = "vectors and no text" if self.sizes.gives_vectors else "text and no vectors"
            raise InvalidRequest(f"this model gives {kind}; ask for those, or serve another model", field="model")
        if params.logits_processors and not self._executor.is_in_process:
            raise InvalidRequest(
                "logits_processors can't cross to the processes of a model that is split over ranks; leave them out, "
                "or set tensor_parallel_size to 1",
                field="logits_processors",
            )
        adapter_id = None if request.adapter is None else self.adapters.id_of(request.adapter)
        if params.seed is None:
            params = params.with_(seed=self._seeds.getrandbits(64))
        sibling_params = params if params.prompt_logprobs is None else params.with_(prompt_logprobs=None)
        added: list[str] = []
        try:
            for index in range(params.n):
                self._scheduler.add(
                    Request(
                        request_id=choice_id(request.request_id, index),
                        prompt_token_ids=request.prompt_token_ids,
                        sampling=params if index == 0 else sibling_params,
                        choice_index=index,
                        parent_id=request.request_id if params.n > 1 else None,
                        eos_token_ids=frozenset(request.eos_token_ids),
                        priority=request.priority,
                        arrival_time=time.monotonic(),
                        cache_salt=request.cache_salt,
                        pooling=request.pooling,
                        adapter_id=adapter_id,
                    )
                )
                added.append(choice_id(request.request_id, index))
                if params.structured is not None:
                    self._grammars.book.enter(added[-1], params.structured)
                if adapter_id is not None:
                    self.adapters.enter(added[-1], adapter_id)
        except BaseException:
            self._outputs(self._scheduler.abort(added))
            raise

    def abort(
        self,
        choices: Iterable[tuple[str, int]],
        reason: FinishReason = FinishReason.ABORT,
        stop_reason: str | None = None,
    ) -> list[EngineOutput]:
        """End choices at once; ended and unknown ones are ignored. Returns the last output of each that ended."""
        names = [choice_id(request_id, index) for request_id, index in choices]
        return self._outputs(self._scheduler.abort(names, reason, stop_reason))

    def has_work(self) -> bool:
        """Whether any request is waiting or running."""
        return self._scheduler.has_unfinished()

    def step(self) -> list[EngineOutput]:
        """Run one step and return what it brought.

        Raises:
            EngineDead: the engine was closed, or an earlier step failed.
        """
        self._check_alive()
        try:
            outputs = self._fail(self._grammars.book.settle())
            began = time.monotonic()
            scheduled, failed = self._grammars.mask(self._scheduler.schedule())
            self._last_step = _facts(scheduled, began)
            outputs += self._fail(failed)
            executed = time.monotonic()
            result = self._executor.execute(scheduled)
            self._payoff.saw(scheduled, result, time.monotonic() - executed)
            deltas = self._scheduler.update(scheduled, result)
            outputs += self._outputs(deltas)
            outputs += self._fail(self._grammars.advance(deltas))
            if self._kv_events is not None:
                self._kv_events.flush()
        except BaseException as error:
            self._dead = f"a step of the engine failed: {type(error).__name__}: {error}; make a new engine"
            raise
        return outputs

    def take_step(self) -> StepFacts | None:
        """What the last step did to whom, once; None when it was taken before."""
        facts, self._last_step = self._last_step, None
        return facts

    def watched(self) -> Sequence[int]:
        """File descriptors that become readable when something ends the engine between two steps: then `check`."""
        return self._executor.watched()

    def check(self) -> None:
        """Raise what has ended the engine since the last step, if anything has."""
        try:
            self._executor.check()
        except BaseException as error:
            self._dead = f"the engine ended: {error}; make a new engine"
            raise

    def stats(self) -> SchedulerStats:
        """Gauges and totals at this moment."""
        return self._scheduler.stats()

    def draw_kv(self) -> BlockMap:
        """A picture of the KV pool; slow, for those who look."""
        return self._blocks.draw()

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op, with reasons and the calls of fallbacks."""
        return self._executor.op_choices()

    @property
    def grammar_compiler(self) -> GrammarCompiler:
        """Compiles the forms of structured replies; a door in this process may ask it too."""
        return self._grammars.book.compiler

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Blocks of running requests stay theirs."""
        self._blocks.reset_prefix_cache()
        if self._kv_events is not None:
            self._kv_events.flush()

    def check_integrity(self) -> None:
        """Raise AssertionError when blocks were lost, counted twice or leaked (see BlockManager)."""
        self._blocks.check_integrity()

    def close(self) -> None:
        """Release devices and memory. Idempotent."""
        self._dead = self._dead or "the engine was closed; make a new one"
        try:
            self._executor.close()
        finally:
            if self._kv_events is not None:
                self._kv_events.close()

    def _drafting(self, num_speculative_tokens: int) -> Drafting | None:
        if not num_speculative_tokens:
            return None
        return Drafting(
            PromptLookup(), max_tokens=num_speculative_tokens, max_rows=self.sizes.max_drawn_rows,
            pays=self._payoff.allows,
        )  # fmt: skip

    def _outputs(self, deltas: Sequence[RequestDelta]) -> list[EngineOutput]:
        """What deltas bring; choices that ended need their adapters and grammars no longer."""
        for delta in deltas:
            if delta.finish_reason is not None:
                self.adapters.leave(delta.request_id)
                self._grammars.book.leave(delta.request_id)
        return [_output(delta) for delta in deltas]

    def _fail(self, reasons: Mapping[str, str]) -> list[EngineOutput]:
        """End choices that can't go on."""
        outputs = []
        for name, reason in reasons.items():
            ended = self._outputs(self._scheduler.abort([name], FinishReason.ERROR))
            outputs += [replace(output, error=reason) for output in ended]
        return outputs

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)


def _facts(scheduled: SchedulerOutput, began: float) -> StepFacts:
    return StepFacts(
        began=began,
        num_tokens=scheduled.total_num_scheduled_tokens,
        started=[split_choice_id(new.request_id) for new in scheduled.new_requests],
        preempted=[split_choice_id(name) for name in scheduled.preempted_request_ids],
    )


def _output(delta: RequestDelta) -> EngineOutput:
    request_id, index = split_choice_id(delta.request_id)
    return EngineOutput(
        request_id=request_id,
        index=index,
        token_ids=list(delta.new_token_ids),
        logprobs=delta.logprobs,
        prompt_logprobs=delta.prompt_logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        num_cached_tokens=delta.num_cached_tokens,
        error=delta.error,
        pooled=delta.pooled,
    )
