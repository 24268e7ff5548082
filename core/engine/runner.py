"""Runs one step: SchedulerOutput -> device inputs -> Program -> rows -> what the stage makes of them.

    execute()
      _apply        rows of the InputBatch and of the stage follow the scheduler's differences
      _copy_blocks  copies on write, before anything is written
      pad           to a shape that the device takes (buckets.py)
      _fill         host inputs into the step's persistent device buffers; one plan per KV group
      program.run   the model's forward pass
      stage.finish  tokens are drawn from logits (sampling_stage.py), or vectors made of hidden rows (pooling_stage.py)

The ModelRunner owns the step buffers and the InputBatch. It knows no device: what differs between devices is behind
`DeviceBackend` and `OpSet`. Nor does it know what the model's rows are for: that is the `OutputStage`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from octavo.core.backend.device import DeviceBackend, Program, StepBuffers
from octavo.core.backend.kv import AttentionMetadata, KVCache
from octavo.core.backend.opset import OpSet
from octavo.core.engine.adapter_rows import NO_SLOT, AdapterRows
from octavo.core.engine.batch import InputBatch, StepInputs
from octavo.core.engine.buckets import step_shapes
from octavo.core.layers.cache_specs import cache_spec
from octavo.core.lora.slots import AdapterSlots
from octavo.core.models.base import Model
from octavo.core.sched.output import ModelRunnerOutput, NewRequest, SchedulerOutput


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of one step that its stage asks the model for.

    Attributes:
        token_rows: the step's tokens that they belong to.
        work: the stage's own note of what to do with them; handed back to it.
    """

    token_rows: tuple[int, ...]
    work: Any


class OutputStage(Protocol):
    """What a model's rows are for. It owns what it keeps of each request; the runner tells it who comes and goes."""

    def add(self, new: NewRequest) -> None:
        """A request starts, or starts again after a preemption."""

    def remove(self, request_id: str) -> None:
        """A request ended or was preempted. Unknown ids are ignored."""

    def wanted(self, inputs: StepInputs) -> WantedRows:
        """The rows that this step's requests need. Changes nothing."""

    def finish(self, work: Any, rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """The step's result, from the rows that were asked for."""


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """A step's persistent buffers on the device; allocated before the KV cache takes its share of what is free.

    Attributes:
        token_ids_T, positions_T, logit_rows_T: int64, for the largest step, padding included.
        logits_RV: fp32, for the rows of a usual step.
        adapter_T: int32, for the largest step; None where the engine serves no adapters.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    logit_rows_T: torch.Tensor
    logits_RV: torch.Tensor
    adapter_T: torch.Tensor | None = None

    @classmethod
    def allocate(
        cls, backend: DeviceBackend, num_tokens: int, num_rows: int, width: int, *, adapters: bool = False
    ) -> Self:
        """Buffers for steps of so many tokens, and as many rows of that width as a step usually wants."""
        return cls(
            token_ids_T=backend.empty(num_tokens, dtype=torch.int64),
            positions_T=backend.empty(num_tokens, dtype=torch.int64),
            logit_rows_T=backend.empty(num_tokens, dtype=torch.int64),
            logits_RV=backend.empty(num_rows, width, dtype=torch.float32),
            adapter_T=backend.empty(num_tokens, dtype=torch.int32) if adapters else None,
        )


class ModelRunner:
    """One model on one device.

    Args:
        model: with weights loaded and its KV bound.
        backend, opset: where it runs.
        stage: takes the model's rows.
        memory: its buffers.
        pool_views: one view of each pool; any of a pool's views covers all its bytes.
        max_num_seqs: requests of a step.
        max_model_len: tokens of a request.
        block_sizes: per KV group, in tokens.
        second_text_offset: as for InputBatch.
        tells_fresh: whether plans say how many requests have no keys but the step's.
        adapters: the model's adapter slots.
    """

    def __init__(
        self,
        *,
        model: Model,
        backend: DeviceBackend,
        opset: OpSet,
        stage: OutputStage,
        memory: RunnerMemory,
        pool_views: Sequence[KVCache],
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: tuple[int, ...],
        second_text_offset: int = 0,
        tells_fresh: bool = True,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self._backend = backend
        self._opset = opset
        self._model = model
        self._stage = stage
        self._pool_views = tuple(pool_views)
        self._batch = InputBatch(max_num_seqs, max_model_len, block_sizes, second_text_offset=second_text_offset)
        self.adapters = AdapterRows(adapters)
        self._block_sizes = block_sizes
        self._memory = memory
        self._copy_pool = [opset.bind("copy_blocks", cache_spec(view, view.spec.dtype)) for view in self._pool_views]
        self._shapes = step_shapes(
            backend.capabilities,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_sizes=block_sizes,
        )
        self._tells_fresh = tells_fresh and self._shapes.are_dynamic
        self._programs: dict[tuple[int, int] | None, Program] = {}
        self._generation = self.adapters.generation
        if self._shapes.are_dynamic:
            self._programs[None] = backend.compile(model.forward, None, None)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. An output without tokens only applies its differences."""
        self._apply(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return ModelRunnerOutput()
        self._copy_blocks(scheduled.block_copies)
        inputs = self._batch.prepare(scheduled)
        wanted = self._stage.wanted(inputs)
        buffers = self._fill(self._shapes.pad(inputs), wanted.token_rows)
        self._program_for(buffers).run(buffers)
        result = self._stage.finish(wanted.work, buffers.logits_RV[: len(wanted.token_rows)])
        result = self.adapters.result(result)
        for request_id, sampled in result.sampled.items():
            self._batch.append_tokens(request_id, sampled.token_ids)
        return result

    def append_drawn(self, drawn: Mapping[str, Sequence[int]]) -> None:
        """Take in the tokens that another rank drew in the last step; a stage of this rank drew none."""
        for request_id, token_ids in drawn.items():
            self._batch.append_tokens(request_id, token_ids)

    def _program_for(self, buffers: StepBuffers) -> Program:
        """The program of any shape, or the one of these buffers' shape, compiled when it first comes up.

        All are made anew once an adapter has brought layers that no adapter had before: they would not run them.
        """
        if self._generation != self.adapters.generation:
            self._generation = self.adapters.generation
            self._programs.clear()
        is_dynamic = self._shapes.are_dynamic
        shape = None if is_dynamic else (len(buffers.token_ids_T), len(buffers.logit_rows_R))
        if shape not in self._programs:
            example = (None, None) if shape is None else (shape[0], buffers)
            self._programs[shape] = self._backend.compile(self._model.forward, *example)
        return self._programs[shape]

    # -- the scheduler's differences --------------------------------------------------------------------------

    def _apply(self, scheduled: SchedulerOutput) -> None:
        for request_id in (*scheduled.finished_request_ids, *scheduled.preempted_request_ids):
            self._batch.remove(request_id)
            self._stage.remove(request_id)
        self.adapters.leave((*scheduled.finished_request_ids, *scheduled.preempted_request_ids))
        for new in scheduled.new_requests:
            self._batch.add(new, self.adapters.enter(new))
            self._stage.add(new)
        for running in scheduled.running:
            self._batch.advance(running)

    def _copy_blocks(self, block_copies: tuple[tuple[int, int], ...]) -> None:
        if not block_copies:
            return
        pairs = self._backend.from_host(torch.tensor(block_copies, dtype=torch.int64))
        for copy, view in zip(self._copy_pool, self._pool_views, strict=True):
            copy(view, pairs)

    # -- inputs -----------------------------------------------------------------------------------------------

    def _fill(self, inputs: StepInputs, token_rows: Sequence[int]) -> StepBuffers:
        to_device, memory = self._backend.from_host, self._memory
        query_start_loc = to_device(torch.from_numpy(inputs.query_start_loc))
        seq_lens = to_device(torch.from_numpy(inputs.seq_lens_B))
        max_query_len, max_seq_len = int(inputs.num_scheduled_B.max()), int(inputs.seq_lens_B.max())
        num_fresh = self._num_fresh(inputs)
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
                    num_fresh=num_fresh,
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
            adapter_T=self._adapters_of(inputs),
        )

    def _num_fresh(self, inputs: StepInputs) -> int:
        if not self._tells_fresh:
            return 0
        counts_B = inputs.num_scheduled_B
        return int(((counts_B > 1) & (counts_B == inputs.seq_lens_B)).sum())

    def _adapters_of(self, inputs: StepInputs) -> torch.Tensor | None:
        """Each token's adapter slot, for a model that was built with adapters.

        A step without any adapter does nothing for them; a device of fixed shapes has one program for both kinds.
        """
        if self._memory.adapter_T is None or inputs.adapter_T is None:
            return None
        if self._shapes.are_dynamic and (inputs.adapter_T == NO_SLOT).all():
            return None
        return self._backend.from_host(torch.from_numpy(inputs.adapter_T), out=self._memory.adapter_T)

    def _logits_for(self, num_rows: int) -> torch.Tensor:
        """Room for the step's rows. Only a step that scores prompts can need more than the persistent ones."""
        logits_RV = self._memory.logits_RV
        if num_rows <= len(logits_RV):
            return logits_RV[:num_rows]
        return self._backend.empty(num_rows, logits_RV.shape[1], dtype=torch.float32)
