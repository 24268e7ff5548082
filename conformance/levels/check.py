"""A check of a level: what a case is to an op, without the harness round a single call.

    Check ── measure() ──► Measured (share of its bound, what ran) ──run──► CaseResult, as every report holds them

It runs in this process: a crash ends the run, and names the check that was running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from octavo.conformance.harness.result import OWN_KERNELS, CaseResult, Status
from octavo.core.backend import OpChoice
from octavo.core.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a check found.

    Attributes:
        compared: numbers or tokens; 0 never passes.
        share: the worst error as a share of its bound; at most 1 passes.
        index: where that is.
        ops: "op:implementation" of everything that was bound.
        problem: why it fails whatever the share is; empty when nothing of the kind was seen.
    """

    compared: int
    share: float
    ops: list[str]
    index: tuple[int, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check. name: unique, "family/point"; output: what is compared."""

    name: str
    level: str
    axes: dict[str, str]
    lane: str
    output: str
    measure: Callable[[], Measured]

    def run(self, *, backend_name: str, seed: int) -> CaseResult:
        """Measure and judge. Raises UserError where the level can't be run at all."""
        result = CaseResult(
            name=self.name,
            op=self.level,
            axes=self.axes,
            lanes=(self.lane,),
            status=Status.FAIL,
            worst_output=self.output,
            rerun=f"octavo conform --backend {backend_name} --seed {seed} --profile {self.level} --only {self.name}",
        )
        started = time.monotonic()
        try:
            measured = self.measure()
        except UserError:
            raise
        except Exception as error:  # whatever a kernel raises is its check's failure
            result.detail = f"{type(error).__name__}: {error}"
        else:
            _judge(result, measured)
        result.seconds = time.monotonic() - started
        return result


def ran(choices: Iterable[OpChoice]) -> list[str]:
    """What an OpSet bound, for `Measured.ops`."""
    return sorted({f"{choice.op}:{choice.implementation}" for choice in choices})


def _judge(result: CaseResult, measured: Measured) -> None:
    result.share = math.inf if math.isnan(measured.share) else measured.share
    result.worst_index, result.ops = measured.index, measured.ops
    fallbacks = [op for op in sorted(OWN_KERNELS) if f"{op}:fallback" in measured.ops]
    result.implementation = "fallback" if fallbacks else "composite"
    if not measured.compared:
        result.detail = measured.problem or "nothing was compared"
    elif measured.problem or result.share > 1:
        where = f" at {list(measured.index)}" if measured.index else ""
        result.detail = measured.problem or f"{result.worst_output}: {result.share:.3g} of its bound{where}"
    elif fallbacks:
        result.status, result.detail = Status.FALLBACK, f"{' and '.join(fallbacks)} run on the reference"
    else:
        result.status = Status.PASS
