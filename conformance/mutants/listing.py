"""The mutation gate in the terminal: each mutant, the case that caught it, the fault it stands for, and who had it.

gemm-bias-dropped               caught by gemm_fused.exact/float32-m17-n48-k100-bias
    the bias is not added
    as in fused epilogues chosen by a heuristic
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from octavo.conformance.mutants.gate import Verdict

WIDTH = 120
NAME_WIDTH = 34


def render(verdict: Verdict) -> str:
    """One mutant, no line wider than WIDTH where the names allow it."""
    by = f"caught by {verdict.caught_by}" if verdict.is_caught else f"ESCAPED {verdict.tried} cases"
    said = [verdict.fault, *([f"as in {verdict.source}"] if verdict.source else [])]
    wrapped = [textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent="      ") for line in said]
    return "\n".join([f"{verdict.mutant:<{NAME_WIDTH}}{by}", *wrapped])


def conclusion(verdicts: Sequence[Verdict], seconds: float, seed: int) -> list[str]:
    """How many were caught, and again what got away."""
    escaped = [verdict.mutant for verdict in verdicts if not verdict.is_caught]
    caught = len(verdicts) - len(escaped)
    lines = [f"{caught}/{len(verdicts)} mutants caught in {seconds:.0f} s, seed {seed}"]
    return [*lines, *(f"escaped: {name}" for name in escaped)]
