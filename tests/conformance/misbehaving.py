"""A family of cases that crash, hang, exit and refuse; loaded by name into the worker under test."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Iterable

import torch

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.harness.bench import Bench
from octavo.conformance.lanes.exact import exact
from octavo.conformance.trial import Trial, given, wanted
from octavo.core.backend import RowSpec


def cases() -> Iterable[Case]:
    for behaviour in ("well", "crash", "hang", "exit", "print"):
        yield Case(
            name=f"behaviour/{behaviour}",
            op="act_mul",
            spec=RowSpec(8, torch.float32, "silu"),
            axes={},
            lanes=("exact",),
            build=functools.partial(build, behaviour),
            timeout_s=1.0 if behaviour == "hang" else 30.0,
        )
    yield Case(
        name="behaviour/crash_in_a_model",
        op="model",
        spec=None,
        axes={},
        lanes=("exact",),
        build=functools.partial(build, "crash"),
    )


def build(behaviour: str, draw: Draw) -> Trial:
    x = draw.integers(32, 64, 2, 8)

    def run(bench: Bench) -> None:
        if behaviour == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if behaviour == "hang":
            time.sleep(600)
        if behaviour == "exit":
            os._exit(3)
        if behaviour == "print":
            os.write(1, b"noise on stdout")
        bench.op("act_mul", RowSpec(8, torch.float32, "silu"))(bench["x"], out=bench["out"], gate="silu")

    want = x[:, :4] * x[:, 4:]
    return Trial((given("x", x), wanted("out", (2, 4), torch.float32)), run, lambda o: [exact("out", o["out"], want)])
