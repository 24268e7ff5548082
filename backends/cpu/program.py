"""Steps without Python: a step whose shape comes again is taken down once, and from then on replayed in native code.

    run(buffers)   its shape is met for the first time    run the step
                   for the second                         run it with the tape on  ──> Recording, or why there is none
                   from then on                           copy what the step's plans say, and replay

What changes from step to step reaches the kernels through memory that doesn't move: the runner's own buffers, and for
the plans (block tables, lengths, slots), which are new in every step, a copy that the recording owns. It is the CPU's
counterpart of a CUDA graph. A step that can't be taken down (adapters, ops of the reference) runs as it always did.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from octavo.backends.cpu.native import NativeContext
from octavo.backends.cpu.tape import Recording
from octavo.core.backend import AttentionMetadata, StepBuffers, StepFunction, StepPlan

MAX_SHAPES = 256
"""Shapes that are remembered, the latest ones; a recording is some 100 kB."""

TABLE_STEP = 64
"""Columns by which the recorded block tables grow."""

Shape = tuple[object, ...]
Plan = Callable[[AttentionMetadata], StepPlan]

log = logging.getLogger(__name__)


class ReplayingProgram:
    """The Program of the CPU backend, for steps of any shape.

    Args:
        step: the model's forward pass.
        context: whose kernels it calls.
        plan: makes a plan of metadata, as the step's own were made.
    """

    def __init__(self, step: StepFunction, context: NativeContext, plan: Plan) -> None:
        self._step = step
        self._context = context
        self._plan = plan
        self._runs: OrderedDict[Shape, StepFunction | None] = OrderedDict()
        self._obstacles: set[str] = set()

    def run(self, buffers: StepBuffers) -> None:
        """See Program."""
        shape = _shape_of(buffers)
        if shape in self._runs:
            self._runs.move_to_end(shape)
            run = self._runs[shape]
            if run is None:
                self._runs[shape] = self._take_down(buffers)
            else:
                run(buffers)
            return
        self._runs[shape] = None
        if len(self._runs) > MAX_SHAPES:
            self._runs.popitem(last=False)
        self._step(buffers)

    def _take_down(self, buffers: StepBuffers) -> StepFunction:
        """Run the step; gives what runs the next ones of its shape."""
        if buffers.adapter_T is not None:
            self._step(buffers)
            return self._step
        plans = tuple(_KeptPlan.like(plan.meta, self._plan) for plan in buffers.plans)
        for kept, plan in zip(plans, buffers.plans, strict=True):
            kept.fill(plan.meta)
        tape = self._context.tape
        with tape.taking() as items:
            self._step(replace(buffers, plans=tuple(kept.plan for kept in plans)))
        if tape.obstacle is not None:
            self._tell(tape.obstacle)
            return self._step
        log.debug("a step of %d tokens is replayed from now on", len(buffers.token_ids_T))
        return _Replayed(Recording(items, self._context.library.replay), plans, buffers)

    def _tell(self, obstacle: str) -> None:
        if obstacle not in self._obstacles:
            self._obstacles.add(obstacle)
            log.info("steps are run call by call: %s can't be replayed", obstacle)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A recording, with the memory that it reads."""

    recording: Recording
    plans: Sequence[_KeptPlan]
    buffers: StepBuffers

    def __call__(self, buffers: StepBuffers) -> None:
        for kept, plan in zip(self.plans, buffers.plans, strict=True):
            kept.fill(plan.meta)
        self.recording.run()


@dataclass(frozen=True, slots=True)
class _KeptPlan:
    """A plan whose tensors stay where they are; each step's are copied into them."""

    plan: StepPlan

    @classmethod
    def like(cls, meta: AttentionMetadata, plan: Plan) -> _KeptPlan:
        """For steps of the same shape as this one."""
        table = meta.block_table.new_zeros(meta.block_table.shape[0], _table_width(meta))
        return cls(
            plan(
                replace(
                    meta,
                    query_start_loc=torch.empty_like(meta.query_start_loc),
                    seq_lens=torch.empty_like(meta.seq_lens),
                    block_table=table,
                    slot_mapping=torch.empty_like(meta.slot_mapping),
                )
            )
        )

    def fill(self, meta: AttentionMetadata) -> None:
        """Take in a step's plan. Columns of the table beyond its own keep what they had; no length reaches them."""
        kept = self.plan.meta
        kept.query_start_loc.copy_(meta.query_start_loc)
        kept.seq_lens.copy_(meta.seq_lens)
        kept.slot_mapping.copy_(meta.slot_mapping)
        kept.block_table[:, : meta.block_table.shape[1]].copy_(meta.block_table)


def _shape_of(buffers: StepBuffers) -> Shape:
    """Everything that a recording has fixed: sizes, and where the runner's buffers are."""
    tensors = (buffers.token_ids_T, buffers.positions_T, buffers.logit_rows_R, buffers.logits_RV)
    return (
        *((x.data_ptr(), x.shape[0]) for x in tensors),
        buffers.adapter_T is None,
        *(
            (meta.num_requests, meta.num_tokens, meta.max_query_len, meta.num_fresh, _table_width(meta))
            for meta in (plan.meta for plan in buffers.plans)
        ),
    )


def _table_width(meta: AttentionMetadata) -> int:
    return -(-meta.block_table.shape[1] // TABLE_STEP) * TABLE_STEP
