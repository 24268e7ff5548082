"""The stage of every rank but the first: it asks the model for the same rows, and makes nothing of them.

    rank 0     wanted(inputs) ──> rows ──> finish: tokens, logprobs, vectors
    others     wanted(inputs) ──> rows ──> nothing; what rank 0 drew comes with the next step

All ranks run the same step, since each holds a part of the model; one answer to it is enough.
"""

from __future__ import annotations

from typing import Any

import torch

from octavo.core.engine.batch import StepInputs
from octavo.core.engine.runner import OutputStage, WantedRows
from octavo.core.sched.output import ModelRunnerOutput, NewRequest


class FollowerStage:
    """An OutputStage that leaves the answer to rank 0.

    Args:
        leader: the stage that rank 0 has, which knows what rows are wanted.
    """

    def __init__(self, leader: OutputStage) -> None:
        self._leader = leader

    def add(self, new: NewRequest) -> None:
        """See OutputStage."""
        self._leader.add(new)

    def remove(self, request_id: str) -> None:
        """See OutputStage."""
        self._leader.remove(request_id)

    def wanted(self, inputs: StepInputs) -> WantedRows:
        """See OutputStage."""
        return self._leader.wanted(inputs)

    def finish(self, work: Any, rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """See OutputStage."""
        return ModelRunnerOutput()
