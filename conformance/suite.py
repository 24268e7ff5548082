"""All cases: families listed by name, and the choice of some of them.

FAMILIES ──import──► grid/<family>.py: cases() ──► names unique over the whole suite ──► select(profile, op, name)

LEVEL_FAMILIES stand apart: their modules import the engine, so that they are imported only when one is asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence

from octavo.conformance.case import Case
from octavo.conformance.profiles import LEVELS, PROFILES, UNCASED, level_of, profile_named
from octavo.core.base.errors import ConfigError
from octavo.core.base.names import nearest

FAMILIES = (
    "octavo.conformance.grid.gemm",
    "octavo.conformance.grid.gemm_fused",
    "octavo.conformance.grid.gemm_quant",
    "octavo.conformance.grid.grouped_gemm",
    "octavo.conformance.grid.grouped_quant",
    "octavo.conformance.grid.lora_gemm",
    "octavo.conformance.grid.rms_norm",
    "octavo.conformance.grid.layer_norm",
    "octavo.conformance.grid.rotary",
    "octavo.conformance.grid.act_mul",
    "octavo.conformance.grid.activation",
    "octavo.conformance.grid.embed",
    "octavo.conformance.grid.quantize",
    "octavo.conformance.grid.moe_route",
    "octavo.conformance.grid.moe_permute",
    "octavo.conformance.grid.moe_combine",
    "octavo.conformance.grid.sample",
    "octavo.conformance.grid.all_reduce_norm",
    "octavo.conformance.grid.collectives",
    "octavo.conformance.grid.cache",
    "octavo.conformance.grid.rope_cache",
    "octavo.conformance.grid.blocks",
    "octavo.conformance.grid.paged_attention",
    "octavo.conformance.grid.paged_again",
    "octavo.conformance.grid.attention",
    "octavo.conformance.grid.merge_attention",
    "octavo.conformance.grid.mla",
    "octavo.conformance.grid.mla_parts",
    "octavo.conformance.grid.program",
    "octavo.conformance.grid.invariance",
    "octavo.conformance.grid.invariance_experts",
)
"""Modules with a function `cases() -> Iterable[Case]`, in the report's order."""

LEVEL_FAMILIES = {"model": "octavo.conformance.levels.model", "engine": "octavo.conformance.levels.engine"}
"""Level -> the same above the ops. Never written to."""


def modules_of(profile: str) -> tuple[str, ...]:
    """The modules whose cases a profile is chosen from."""
    if profile in UNCASED:
        return ()
    return (LEVEL_FAMILIES[profile],) if profile in LEVELS else FAMILIES


@functools.cache
def families(modules: tuple[str, ...] = FAMILIES) -> dict[str, Case]:
    """Every case by name. Raises ValueError for two cases of one name: names must stay meaningful in reports."""
    cases: dict[str, Case] = {}
    for module in modules:
        for case in importlib.import_module(module).cases():
            if case.name in cases:
                raise ValueError(f"two cases are named {case.name}; the second is in {module}")
            if unknown := case.profiles - {*PROFILES, *LEVELS}:
                raise ValueError(f"case {case.name} names the profiles {sorted(unknown)}, which don't exist")
            cases[case.name] = case
    return cases


def select(
    profile: str = "full", *, op: str | None = None, name: str | None = None, modules: Sequence[str] | None = None
) -> list[Case]:
    """The cases of a profile, narrowed to an op, or the one of a name or a name's prefix ("gemm.exact/").

    Args:
        modules: of families; None for the profile's own.

    Raises:
        ConfigError: nothing is left, or there is no such profile.
    """
    chosen = profile_named(profile)
    everything = families(modules_of(profile) if modules is None else tuple(modules))
    cases = [case for case in everything.values() if chosen.contains(case)]
    found = cases
    if op is not None:
        found = [c for c in found if c.op == op]
    if name is not None:
        found = [c for c in found if c.name == name] or [c for c in found if c.name.startswith(name)]
    if not found:
        narrowed = ", ".join(f"{k} {v}" for k, v in (("op", op), ("name", name)) if v is not None)
        hint = _elsewhere(op or name or "", profile, cases, everything.values())
        raise ConfigError(
            f"no case of profile {profile} fits {narrowed}{hint}; see `octavo conform list`", field="only"
        )
    return found


def _elsewhere(word: str, profile: str, cases: Iterable[Case], everything: Iterable[Case]) -> str:
    """What may have been meant: the word under another profile, or a name like it."""
    if any(word in (case.op, case.name) or case.name.startswith(word) for case in everything):
        return "; cases of other profiles do (--profile full)"
    if (level := level_of(word)) is not None and level != profile:
        return f"; it is of the profile {level}"
    near = nearest(word, {n for case in cases for n in (case.op, case.family, f"{case.family}/", case.name)})
    return f"; did you mean {near!r}?" if near else ""


def catching(fault: str, cases: Iterable[Case]) -> list[Case]:
    """The cases that are there to catch a mutant."""
    return [case for case in cases if fault in case.faults]
