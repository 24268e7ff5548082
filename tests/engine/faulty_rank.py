"""A rank's process in which rank 1 goes wrong: run in place of the engine's own by the tests of tensor parallelism.

RANK_FAULT says when and how: "load" and "step" raise there, "exit" leaves in a step without a word to the engine,
"hang" sleeps in a step, while the others wait for it RANK_PATIENCE seconds, not the usual minutes.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from typing import cast

from octavo.backends.common.comm import TorchCommunicator
from octavo.core.base.config import EngineConfig
from octavo.core.engine import rank_process
from octavo.core.engine.worker import WHOLE, Worker
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.parallel.mesh import Place
from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput

FAULT = os.environ["RANK_FAULT"]


class FaultyWorker(Worker):
    """A Worker that fails as told, on rank 1."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, place: Place = WHOLE) -> None:
        if FAULT == "load" and place.rank == 1:
            raise ValueError("no room on this device")
        super().__init__(config, checkpoint, place)
        self._is_faulty = place.rank == 1
        if FAULT == "hang":
            patience = datetime.timedelta(seconds=float(os.environ["RANK_PATIENCE"]))
            cast(TorchCommunicator, self._comm)._group._set_default_timeout(patience)  # type: ignore[union-attr]

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if self._is_faulty and FAULT == "step":
            raise ArithmeticError("the kernel of rank 1")
        if self._is_faulty and FAULT == "exit":
            sys.stderr.write("the driver says farewell\n")
            sys.stderr.flush()
            os._exit(7)
        if self._is_faulty and FAULT == "hang":
            time.sleep(600)
        return super().execute(scheduled)


rank_process.Worker = FaultyWorker  # type: ignore[misc]
sys.exit(rank_process.main(int(sys.argv[1])))
