"""Faults of recorded steps: what a graph keeps of the step that it was recorded from."""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.conformance.harness.host import HostBackend
from octavo.conformance.mutants.base import Mutant
from octavo.core.backend import Program, StepBuffers, StepFunction, StepPlan


class StaleLengths:
    """A recorded step: KV lengths are those of the first run."""

    def __init__(self, step: StepFunction) -> None:
        self._step = step
        self._lengths: list[torch.Tensor] = []

    def run(self, buffers: StepBuffers) -> None:
        if not self._lengths:
            self._lengths = [plan.meta.seq_lens.clone() for plan in buffers.plans]
        plans = [
            StepPlan(replace(plan.meta, seq_lens=lengths))
            for plan, lengths in zip(buffers.plans, self._lengths, strict=True)
        ]
        self._step(replace(buffers, plans=tuple(plans)))


class Recorder(HostBackend):
    """A host that records steps, badly."""

    def compile(self, step: StepFunction, bucket: int | None, buffers: StepBuffers | None) -> Program:
        return StaleLengths(step)


MUTANTS = (
    Mutant(
        "stale-length-on-replay",
        "a recorded step goes on with the KV lengths of the step that it was recorded from",
        "graphs into which a length was baked as a kernel's argument",
        "paged_attention",
        lambda honest: honest,
        host=Recorder,
    ),
)
