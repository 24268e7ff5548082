"""The mutation gate: every mutant must be caught by a case that names it.

    mutant ──► cases with its name in `faults` ──► the first that fails catches it ──► Verdict

Mutants run in this process: they are the reference ops, which don't crash. The ranks of a group are its threads.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence

import msgspec

from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.mutants.base import Mutant
from octavo.conformance.suite import catching, families

MODULES = (
    "octavo.conformance.mutants.attention",
    "octavo.conformance.mutants.cache",
    "octavo.conformance.mutants.mla",
    "octavo.conformance.mutants.products",
    "octavo.conformance.mutants.quantised",
    "octavo.conformance.mutants.rows",
    "octavo.conformance.mutants.norms",
    "octavo.conformance.mutants.moe",
    "octavo.conformance.mutants.permute",
    "octavo.conformance.mutants.lora",
    "octavo.conformance.mutants.sampling",
    "octavo.conformance.mutants.comm",
    "octavo.conformance.mutants.replay",
    "octavo.conformance.mutants.again",
    "octavo.conformance.mutants.batches",
)
"""Modules with a tuple MUTANTS, in the report's order."""


class Verdict(msgspec.Struct, kw_only=True):
    """Whether a mutant was caught.

    Attributes:
        fault, source: as the mutant says.
        caught_by: the case; empty when it escaped.
        detail: what the case said.
        tried: how many cases ran.
    """

    mutant: str
    fault: str
    source: str = ""
    caught_by: str = ""
    detail: str = ""
    tried: int = 0

    @property
    def is_caught(self) -> bool:
        return bool(self.caught_by)


def mutants(modules: Sequence[str] = MODULES) -> dict[str, Mutant]:
    """Every mutant by name. Raises ValueError for two of one name."""
    found: dict[str, Mutant] = {}
    for module in modules:
        for mutant in importlib.import_module(module).MUTANTS:
            if mutant.name in found:
                raise ValueError(f"two mutants are named {mutant.name}; the second is in {module}")
            found[mutant.name] = mutant
    return found


def unknown_faults(cases: Iterable[Case], known: Iterable[str]) -> dict[str, list[str]]:
    """Faults that cases name and no mutant has: fault -> cases."""
    names, unknown = set(known), dict[str, list[str]]()
    for case in cases:
        for fault in case.faults - names:
            unknown.setdefault(fault, []).append(case.name)
    return unknown


def try_mutant(mutant: Mutant, seed: int, cases: Iterable[Case] | None = None) -> Verdict:
    """Run the cases that name a mutant, and concern its backend, until one fails."""
    verdict = Verdict(mutant=mutant.name, fault=mutant.fault, source=mutant.source)
    backend = mutant.make()
    facts = Facts.of(backend.capabilities)
    for case in catching(mutant.name, families().values() if cases is None else cases):
        if case.requires(facts) is not None:
            continue
        verdict.tried += 1
        result = judge(case, backend, seed, peers=[mutant.make() for _ in range(1, case.world)])
        if result.status is Status.FAIL:
            verdict.caught_by, verdict.detail = case.name, result.detail
            break
    return verdict


def run_gate(seed: int) -> list[Verdict]:
    """All mutants. The gate holds when every one is caught."""
    return [try_mutant(mutant, seed) for mutant in mutants().values()]
