"""A case whose trial is drawn once for several backends: its tensors, and what its oracle has found, are shared.

    shared(case) ──build(draw)──► drawn before for these facts and this rank? ──► that Trial : a new one

For honest backends alone, which get copies of a trial's tensors as every candidate does. Where a candidate is judged,
the trial is drawn a second time (harness/judge.py).
"""

from __future__ import annotations

from dataclasses import replace

from octavo.conformance.case import Case
from octavo.conformance.draw import Draw
from octavo.conformance.trial import Trial


def shared(case: Case) -> Case:
    """The case with a memory; to be dropped before the next seed's, since it knows of one seed alone."""
    drawn: list[tuple[Draw, Trial]] = []

    def build(draw: Draw) -> Trial:
        for known, trial in drawn:
            if (known.facts, known.rank) == (draw.facts, draw.rank):
                return trial
        trial = case.build(draw)
        drawn.append((draw, trial))
        return trial

    return replace(case, build=build)
