"""Steps of one shape, recorded once and replayed.

    run 1   step(buffers)                     plainly: kernels are compiled, libraries take their workspaces
    run 2   record step(kept buffers)         nothing runs while it is recorded …
            replay                            … so it is replayed at once
    run n   new inputs ──copy──► kept ones    where they lie elsewhere; token ids, positions and logits never do
            replay

A recording holds addresses, and whatever the host decided while it was made. So of a step only this may differ in a
replay: what stands in the tensors of StepBuffers and of each plan's `meta`. They are copied to where the recording
reads them. What else a plan holds is either the same (its tensors in the same place, its other fields equal), or the
step is recorded anew. The counts in `meta` vary from step to step: reading one while a step is recorded raises.

What can't be recorded runs plainly for good; each reason is logged once. Recordings share one pool of memory: they run
one after another, and nothing in it outlives a run.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.backends.common.runtime import Recording, Runtime, Stream
from octavo.core.backend import AttentionMetadata, StepBuffers, StepFunction, StepPlan

log = logging.getLogger(__name__)

MOST_RECORDINGS = 4
"""Of one shape: plans may differ in what the host chose, such as a number of splits. The oldest goes first."""

MOST_ATTEMPTS = 16
"""Of one shape. Plans that keep moving would have every step recorded, which is slower than not to record at all."""

_COUNTS = ("num_requests", "num_tokens", "max_query_len", "max_seq_len")


class Complaints:
    """Why steps are not recorded: each reason is logged once for a backend, not for each of its shapes."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            log.warning("steps are launched kernel by kernel, which is slower than a recording: %s", reason)


class GraphProgram:
    """A Program of one shape."""

    def __init__(self, step: StepFunction, runtime: Runtime, stream: Stream, complaints: Complaints) -> None:
        self._step = step
        self._runtime = runtime
        self._stream = stream
        self._complaints = complaints
        self._logits: StorageWeakRef | None = None
        self._is_plain = False
        self._recorded: list[_Recorded] = []
        self._attempts = 0

    def run(self, buffers: StepBuffers) -> None:
        self._runtime.use(self._stream)
        recorded = None if self._logits is None or self._is_plain else self._recording_for(buffers)
        if recorded is None:
            self._step(buffers)
            self._logits = self._logits or StorageWeakRef(buffers.logits_RV.untyped_storage())
            return
        recorded.take(buffers)
        recorded.recording.replay()

    def _recording_for(self, buffers: StepBuffers) -> _Recorded | None:
        """One that these buffers fit, made if need be; None where the step can't be recorded."""
        for recorded in self._recorded:
            if recorded.fits(buffers):
                return recorded
        if self._logits is None or self._logits.expired():  # a step that scores prompts writes to room of its own
            self._is_plain = True
            return None
        self._attempts += 1
        if self._attempts > MOST_ATTEMPTS:
            self._give_up(f"their plans differed {MOST_ATTEMPTS} times in more than their metadata")
            return None
        try:
            recording = self._runtime.record(self._stream, lambda: self._step(sealed(buffers)))
        except Exception as error:
            self._give_up(f"{type(error).__name__}: {error}")
            return None
        self._recorded = [*self._recorded[1 - MOST_RECORDINGS :], _Recorded(recording, buffers)]
        return self._recorded[-1]

    def _give_up(self, reason: str) -> None:
        """From now on the step runs plainly."""
        self._complaints.say(reason)
        self._is_plain = True
        self._recorded.clear()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A recording and the buffers that it reads and writes, which it keeps alive."""

    recording: Recording
    buffers: StepBuffers

    def fits(self, buffers: StepBuffers) -> bool:
        """Whether a replay does what the step would do with these buffers, once their contents are copied."""
        if not _same_place(self.buffers.logits_RV, buffers.logits_RV) or len(self.buffers.plans) != len(buffers.plans):
            return False
        if (self.buffers.adapter_T is None) != (buffers.adapter_T is None):
            return False
        pairs = zip(_inputs(self.buffers), _inputs(buffers), strict=True)
        return all(kept.shape == new.shape and kept.dtype == new.dtype for kept, new in pairs) and all(
            _same_choices(kept, new) for kept, new in zip(self.buffers.plans, buffers.plans, strict=True)
        )

    def take(self, buffers: StepBuffers) -> None:
        """Copy what lies elsewhere to where the recording reads it."""
        for kept, new in zip(_inputs(self.buffers), _inputs(buffers), strict=True):
            if not _same_place(kept, new):
                kept.copy_(new)


def _inputs(buffers: StepBuffers) -> Iterator[torch.Tensor]:
    """What a step reads of its buffers, in a fixed order."""
    yield from (buffers.token_ids_T, buffers.positions_T, buffers.logit_rows_R)
    if buffers.adapter_T is not None:
        yield buffers.adapter_T
    for plan in buffers.plans:
        yield from _meta_tensors(plan.meta)


def _meta_tensors(meta: AttentionMetadata) -> Iterator[torch.Tensor]:
    yield from (meta.query_start_loc, meta.seq_lens, meta.block_table, meta.slot_mapping)


def _same_choices(kept: StepPlan, new: StepPlan) -> bool:
    """Whether two plans agree in all but their metadata: tensors by their place, other fields by their value."""
    if type(kept) is not type(new) or kept.meta.block_size != new.meta.block_size:
        return False
    return all(_same(getattr(kept, name), getattr(new, name)) for name in _choice_names(kept))


def _choice_names(plan: StepPlan) -> list[str]:
    return [field.name for field in dataclasses.fields(plan) if field.name != "meta"]


def _same(kept: Any, new: Any) -> bool:
    if isinstance(kept, torch.Tensor):
        return isinstance(new, torch.Tensor) and _same_place(kept, new)
    if isinstance(kept, tuple | list):
        return type(kept) is type(new) and len(kept) == len(new) and all(map(_same, kept, new))
    return bool(kept == new)


def _same_place(kept: torch.Tensor, new: torch.Tensor) -> bool:
    return (
        kept.data_ptr() == new.data_ptr()
        and kept.shape == new.shape
        and kept.dtype == new.dtype
        and kept.stride() == new.stride()
    )


def sealed(buffers: StepBuffers) -> StepBuffers:
    """The buffers as a step sees them while it is recorded: counts that vary can't be read."""
    plans = []
    for plan in buffers.plans:
        plan = copy.copy(plan)
        plan.meta = _Sealed(plan.meta)
        plans.append(plan)
    return dataclasses.replace(buffers, plans=tuple(plans))


class _Sealed(AttentionMetadata):
    """Metadata of a recorded step."""

    def __init__(self, meta: AttentionMetadata) -> None:
        for field in dataclasses.fields(meta):
            if field.name not in _COUNTS:
                object.__setattr__(self, field.name, getattr(meta, field.name))

    def __getattr__(self, name: str) -> NoReturn:
        """Reached only for what was left unset."""
        raise RuntimeError(
            f"the step reads {name} of its metadata, which varies from step to step and would be fixed by a recording; "
            "an op decides by it in plan()"
        )
