"""A family of cases of two ranks, of which one crashes, hangs, fails or gives other bits; loaded by name."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterable

import torch

from octavo.conformance.case import Case, forms_groups_of
from octavo.conformance.draw import Draw
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.trial import Trial, given, updated, wanted
from octavo.core.backend import RowSpec

SPEC = RowSpec(8, torch.float32)
LIMIT_S = {"hang": 2.0, "hang_for_long": 300.0}


def cases() -> Iterable[Case]:
    for behaviour in ("well", "crash", "hang", "hang_for_long", "fail", "differ"):
        yield Case(
            name=f"group/{behaviour}",
            op="all_reduce_norm",
            spec=SPEC,
            axes={},
            lanes=("exact",),
            build=functools.partial(build, behaviour),
            requires=forms_groups_of(2),
            world=2,
            timeout_s=LIMIT_S.get(behaviour, 60.0),
        )


def build(behaviour: str, draw: Draw) -> Trial:
    x = draw.integers(1, 9, 2, 4, 8)

    def run(bench: Bench) -> None:
        comm = bench.communicator()
        if draw.rank == 1:
            misbehave(behaviour)
        comm.all_reduce(bench["x"], out=bench["out"])
        comm.barrier()
        bench["own"].add_(draw.rank if behaviour == "differ" else 0)

    def misbehave(behaviour: str) -> None:
        if behaviour == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour.startswith("hang"):
            time.sleep(600)
        if behaviour == "fail":
            raise ArithmeticError("the kernel of rank 1")

    own = torch.ones(3)
    tensors = (given("x", x[draw.rank]), wanted("out", (4, 8), torch.float32), updated("own", own))
    return Trial(
        tensors, run, lambda outputs: [exact("out", outputs["out"], x.sum(0))], shared=frozenset({"out", "own"})
    )
