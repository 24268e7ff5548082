"""Selection, gaps.toml and what the suite imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.conformance.gaps import GapKind, parse_gaps
from octavo.conformance.suite import families, select
from octavo.core.base.errors import ConfigError

CASES = list(families().values())


def test_select_narrows_and_says_when_nothing_is_left() -> None:
    assert {c.op for c in select("core", op="rms_norm")} == {"rms_norm"}
    assert [c.name for c in select(name="rms_norm/float32-5x64")] == ["rms_norm/float32-5x64"]
    assert len(select(name="gemm.exact/")) > 10
    assert set(select("full")) >= set(select("core"))
    with pytest.raises(ConfigError, match="no case of profile core fits op nonesuch"):
        select("core", op="nonesuch")
    with pytest.raises(ConfigError, match="profile 'corr' must be one of"):
        select("corr")


def test_gaps_name_cases_or_ops() -> None:
    text = '[[gap]]\nop = "rms_norm"\nkind = "never"\nreason = "no norms"\n'
    gaps = parse_gaps(text, CASES)
    assert set(gaps) == {c.name for c in CASES if c.op == "rms_norm"}
    assert {g.kind for g in gaps.values()} == {GapKind.NEVER}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[gap]]\ncase = "x/y"\nkind = "never"\nreason = "r"', "case 'x/y' is none of the suite"),
        ('[[gap]]\nop = "gemm"\nkind = "maybe"\nreason = "r"', "kind 'maybe' must be one of"),
        ('[[gap]]\nop = "gemm"\nkind = "never"\nreason = " "', "must have case or op, kind and reason"),
        ("[other]\n", "unknown keys"),
        ("[[gap", "is no TOML"),
    ],
)
def test_gaps_are_strict(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gaps(text, CASES)


def test_the_suite_needs_nothing_of_the_engine() -> None:
    code = (
        "import sys; from octavo.conformance import suite; from octavo.conformance.harness import worker\n"
        "from octavo.conformance.mutants import gate; suite.families(); gate.mutants()\n"
        "bad = [m for m in sys.modules if m.startswith(tuple('octavo.core.' + p for p in\n"
        "       ('engine', 'serve', 'models', 'load', 'sched', 'layers', 'text', 'sample', 'cli')))]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "src"}, timeout=100)
