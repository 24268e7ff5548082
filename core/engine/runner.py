"""Runs one step: SchedulerOutput -> device inputs -> Program -> logits -> sampled tokens.

    execute()
      _apply        rows of the InputBatch and of the sampler follow the scheduler's differences
      _copy_blocks  copies on write, before anything is written
      pad           to a shape that the device takes (buckets.py)
      _fill         host inputs into the step's persistent device buffers; one plan per KV group
      program.run   the model's forward pass
      _sample       rows whose last known token was computed draw their next one
      _score        prompt logprobs of the requests that asked for them

The ModelRunner owns the step buffers, the InputBatch and the sampling rows. It knows no device: what differs between
devices is behind `DeviceBackend` and `OpSet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from octavo.core.backend.device import DeviceBackend, Program, StepBuffers
from octavo.core.backend.kv import AttentionMetadata, KVCache
from octavo.core.backend.opset import OpSet
from octavo.core.backend.specs import CacheSpec, RowSpec
from octavo.core.engine.batch import InputBatch, StepInputs
from octavo.core.engine.buckets import step_shapes
from octavo.core.engine.prompt_scores import PromptScores
from octavo.core.models.base import Model
from octavo.core.sample.logprobs import PositionLogprobs
from octavo.core.sample.sampler import Sampler
from octavo.core.sample.state import SamplingRow
from octavo.core.sched.output import ModelRunnerOutput, NewRequest, SampledTokens, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt positions first, …, stop - 1 of one request, to be scored in one step; none when stop is first.

    Attributes:
        ends_prompt: the step computes the last prompt token, so that all scores are there afterwards.
    """

    request_id: str
    first: int
    stop: int
    ends_prompt: bool


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The logits of one step: `sampling` requests, one row each, then the positions of `scoring`.

    Attributes:
        token_rows: the step's tokens that they belong to, in that order.
    """

    sampling: tuple[str, ...]
    scoring: tuple[ScoredChunk, ...]
    token_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """A step's persistent buffers on the device; allocated before the KV cache takes its share of what is free.

    Attributes:
        token_ids_T, positions_T, logit_rows_T: int64, for the largest step, padding included.
        logits_BV: fp32, a row for each request.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    logit_rows_T: torch.Tensor
    logits_BV: torch.Tensor

    @classmethod
    def allocate(cls, backend: DeviceBackend, num_tokens: int, num_requests: int, vocab_size: int) -> Self:
        """Buffers for steps of so many tokens and requests."""
        return cls(
            token_ids_T=backend.empty(num_tokens, dtype=torch.int64),
            positions_T=backend.empty(num_tokens, dtype=torch.int64),
            logit_rows_T=backend.empty(num_tokens, dtype=torch.int64),
            logits_BV=backend.empty(num_requests, vocab_size, dtype=torch.float32),
        )


class ModelRunner:
    """One model on one device.

    Args:
        model: with weights loaded and its KV bound.
        backend, opset: where it runs.
        memory: its buffers.
        pool_views: one view of each pool; any of a pool's views covers all its bytes.
        max_model_len: tokens of a request.
        block_sizes: per KV group, in tokens.
    """

    def __init__(
        self,
        *,
        model: Model,
        backend: DeviceBackend,
        opset: OpSet,
        memory: RunnerMemory,
        pool_views: Sequence[KVCache],
        max_model_len: int,
        block_sizes: tuple[int, ...],
    ) -> None:
        self._backend = backend
        self._opset = opset
        self._model = model
        self._sampler = Sampler(opset.bind("sample", RowSpec(width=model.vocab_size, dtype=torch.float32)))
        self._pool_views = tuple(pool_views)
        self._batch = InputBatch(len(memory.logits_BV), max_model_len, block_sizes)
        self._block_sizes = block_sizes
        self._rows: dict[str, SamplingRow] = {}
        self._scores: dict[str, PromptScores] = {}
        self._memory = memory
        self._copy_pool = [opset.bind("copy_blocks", _copy_spec(view)) for view in self._pool_views]
        self._shapes = step_shapes(
            backend.capabilities,
            max_num_seqs=len(memory.logits_BV),
            max_model_len=max_model_len,
            block_sizes=block_sizes,
        )
        self._programs: dict[tuple[int, int] | None, Program] = {}
        if self._shapes.are_dynamic:
            self._programs[None] = backend.compile(model.forward, None, None)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. An output without tokens only applies its differences."""
        self._apply(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return ModelRunnerOutput()
        self._copy_blocks(scheduled.block_copies)
        inputs = self._batch.prepare(scheduled)
        wanted = self._wanted_rows(inputs)
        buffers = self._fill(self._shapes.pad(inputs), wanted.token_rows)
        self._program_for(buffers).run(buffers)
        return self._finish(wanted, buffers.logits_RV[: len(wanted.token_rows)])

    def _program_for(self, buffers: StepBuffers) -> Program:
        """The program of any shape, or the one of these buffers' shape, compiled when it first comes up."""
        if self._shapes.are_dynamic:
            return self._programs[None]
        num_tokens, num_rows = len(buffers.token_ids_T), len(buffers.logit_rows_R)
        if (num_tokens, num_rows) not in self._programs:
            program = self._backend.compile(self._model.forward, num_tokens, buffers)
            self._programs[num_tokens, num_rows] = program
        return self._programs[num_tokens, num_rows]

    # -- the scheduler's differences --------------------------------------------------------------------------

    def _apply(self, scheduled: SchedulerOutput) -> None:
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self._batch.remove(request_id)
            self._rows.pop(request_id, None)
            self._scores.pop(request_id, None)
        for new in scheduled.new_requests:
            self._batch.add(new)
            self._rows[new.request_id] = _sampling_row(new)
            if new.needs_prompt_logprobs:
                self._scores[new.request_id] = PromptScores(new)
        for running in scheduled.running:
            self._batch.advance(running)

    def _copy_blocks(self, block_copies: tuple[tuple[int, int], ...]) -> None:
        if not block_copies:
            return
        pairs = self._backend.from_host(torch.tensor(block_copies, dtype=torch.int64))
        for copy, view in zip(self._copy_pool, self._pool_views, strict=True):
            copy(view, pairs)

    # -- inputs -----------------------------------------------------------------------------------------------

    def _wanted_rows(self, inputs: StepInputs) -> WantedRows:
        """Which tokens' logits the step needs: first those that sample, then prompt positions to be scored."""
        sampling: list[str] = []
        sampling_rows: list[int] = []
        scoring: list[ScoredChunk] = []
        scoring_rows: list[int] = []
        ends = (inputs.query_start_loc[1:] - 1).tolist()
        for request_id, end, length, count in zip(
            inputs.request_ids, ends, inputs.seq_lens_B.tolist(), inputs.num_scheduled_B.tolist(), strict=True
        ):
            if length == self._batch.length(request_id) and self._rows[request_id].samples:
                sampling.append(request_id)
                sampling_rows.append(end)
            if (scores := self._scores.get(request_id)) is not None:
                first = length - count
                stop = max(first, min(length, scores.num_positions))
                scoring.append(ScoredChunk(request_id, first, stop, ends_prompt=length > scores.num_positions))
                scoring_rows.extend(range(end + 1 - count, end + 1 - count + stop - first))
        return WantedRows(tuple(sampling), tuple(scoring), (*sampling_rows, *scoring_rows))

    def _fill(self, inputs: StepInputs, token_rows: Sequence[int]) -> StepBuffers:
        to_device, memory = self._backend.from_host, self._memory
        query_start_loc = to_device(torch.from_numpy(inputs.query_start_loc))
        seq_lens = to_device(torch.from_numpy(inputs.seq_lens_B))
        max_query_len, max_seq_len = int(inputs.num_scheduled_B.max()), int(inputs.seq_lens_B.max())
        num_rows = self._shapes.logit_rows(len(token_rows), len(inputs.token_ids_T))
        padded_rows = [*token_rows, *[0] * (num_rows - len(token_rows))]
        plans = tuple(
            self._opset.plan(
                AttentionMetadata(
                    num_requests=len(inputs.request_ids),
                    num_tokens=int(inputs.num_scheduled_B.sum()),
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=to_device(torch.from_numpy(group.block_table)),
                    slot_mapping=to_device(torch.from_numpy(group.slot_mapping)),
                    block_size=block_size,
                )
            )
            for group, block_size in zip(inputs.groups, self._block_sizes, strict=True)
        )
        return StepBuffers(
            token_ids_T=to_device(torch.from_numpy(inputs.token_ids_T), out=memory.token_ids_T),
            positions_T=to_device(torch.from_numpy(inputs.positions_T), out=memory.positions_T),
            plans=plans,
            logit_rows_R=to_device(torch.tensor(padded_rows, dtype=torch.int64), out=memory.logit_rows_T),
            logits_RV=self._logits_for(num_rows),
        )

    def _logits_for(self, num_rows: int) -> torch.Tensor:
        """Room for the step's logits. Only a step that scores prompts can need more than the persistent rows."""
        logits_BV = self._memory.logits_BV
        if num_rows <= len(logits_BV):
            return logits_BV[:num_rows]
        return self._backend.empty(num_rows, logits_BV.shape[1], dtype=torch.float32)

    # -- outputs ----------------------------------------------------------------------------------------------

    def _finish(self, wanted: WantedRows, logits_RV: torch.Tensor) -> ModelRunnerOutput:
        split = len(wanted.sampling)
        scored, unscored = self._score(wanted.scoring, logits_RV[split:]) if wanted.scoring else ({}, {})
        sampled, failed = self._sample(wanted.sampling, logits_RV[:split]) if wanted.sampling else ({}, {})
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs=scored, failed=unscored | failed)

    def _sample(
        self, request_ids: tuple[str, ...], logits_RV: torch.Tensor
    ) -> tuple[dict[str, SampledTokens], dict[str, str]]:
        drawn = self._sampler.sample(logits_RV, [self._rows[request_id] for request_id in request_ids])
        failed = {request_ids[row]: reason for row, reason in drawn.failed.items()}
        sampled = {}
        for row, request_id in enumerate(request_ids):
            if request_id in failed:
                continue
            token_id, logprobs = drawn.token_ids[row], drawn.logprobs[row]
            sampled[request_id] = SampledTokens((token_id,), None if logprobs is None else (logprobs,))
            self._rows[request_id].append(token_id)
            self._batch.append_tokens(request_id, (token_id,))
        return sampled, failed

    def _score(
        self, scoring: Sequence[ScoredChunk], logits_RV: torch.Tensor
    ) -> tuple[dict[str, list[PositionLogprobs]], dict[str, str]]:
        """Score prompt positions; returns the prompts that are complete, and the requests that can't be scored."""
        complete, failed = {}, {}
        row = 0
        for chunk in scoring:
            scores = self._scores[chunk.request_id]
            logits_TV = logits_RV[row : row + chunk.stop - chunk.first]
            row += len(logits_TV)
            if not bool(logits_TV.amax(dim=-1).isfinite().all()):
                failed[chunk.request_id] = "logits of the prompt are NaN or infinite"
                continue
            scores.add(chunk.first, logits_TV)
            if chunk.ends_prompt:
                complete[chunk.request_id] = scores.positions
                del self._scores[chunk.request_id]
        return complete, failed


def _copy_spec(view: KVCache) -> CacheSpec:
    spec = view.spec
    return CacheSpec(
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        x_dtype=spec.dtype,
        kv_dtype=spec.dtype,
        block_size=spec.block_size,
        layout=view.layout,
    )


def _sampling_row(new: NewRequest) -> SamplingRow:
    return SamplingRow(
        new.sampling,
        new.token_ids[: new.num_prompt_tokens],
        new.token_ids[new.num_prompt_tokens :],
        choice=new.choice_index,
        end_token_ids=new.end_token_ids,
    )
