"""All cases: families listed by name, and the choice of some of them.

FAMILIES ──import──► grid/<family>.py: cases() ──► names unique over the whole suite ──► select(profile, op, name)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable, Sequence

from octavo.conformance.case import Case
from octavo.conformance.profiles import LEVELS, PROFILES
from octavo.core.base.errors import ConfigError

FAMILIES = (
    "octavo.conformance.grid.gemm",
    "octavo.conformance.grid.gemm_fused",
    "octavo.conformance.grid.gemm_quant",
    "octavo.conformance.grid.grouped_gemm",
    "octavo.conformance.grid.lora_gemm",
    "octavo.conformance.grid.rms_norm",
    "octavo.conformance.grid.rotary",
    "octavo.conformance.grid.act_mul",
    "octavo.conformance.grid.embed",
    "octavo.conformance.grid.quantize",
    "octavo.conformance.grid.moe_route",
    "octavo.conformance.grid.sample",
    "octavo.conformance.grid.all_reduce_norm",
    "octavo.conformance.grid.cache",
    "octavo.conformance.grid.rope_cache",
    "octavo.conformance.grid.blocks",
    "octavo.conformance.grid.paged_attention",
    "octavo.conformance.grid.attention",
    "octavo.conformance.grid.merge_attention",
    "octavo.conformance.grid.mla",
    "octavo.conformance.grid.mla_parts",
    "octavo.conformance.grid.program",
    "octavo.conformance.grid.invariance",
)
"""Modules with a function `cases() -> Iterable[Case]`, in the report's order."""


@functools.cache
def families(modules: tuple[str, ...] = FAMILIES) -> dict[str, Case]:
    """Every case by name. Raises ValueError for two cases of one name: names must stay meaningful in reports."""
    cases: dict[str, Case] = {}
    for module in modules:
        for case in importlib.import_module(module).cases():
            if case.name in cases:
                raise ValueError(f"two cases are named {case.name}; the second is in {module}")
            if unknown := case.profiles - set(PROFILES):
                raise ValueError(f"case {case.name} names the profiles {sorted(unknown)}, which don't exist")
            cases[case.name] = case
    return cases


def select(
    profile: str = "full", *, op: str | None = None, name: str | None = None, modules: Sequence[str] = FAMILIES
) -> list[Case]:
    """The cases of a profile, narrowed to an op, or the one of a name or a name's prefix ("gemm.exact/").

    Raises ConfigError when nothing is left.
    """
    if profile in LEVELS:
        raise ConfigError(
            f"profile {profile} has checks of its own instead of cases; run octavo conform --profile {profile}",
            field="profile",
        )
    if profile not in PROFILES:
        known = ", ".join([*PROFILES, *LEVELS])
        raise ConfigError(f"profile {profile!r} must be one of {known}", field="profile")
    found = [c for c in families(tuple(modules)).values() if PROFILES[profile].contains(c)]
    if op is not None:
        found = [c for c in found if c.op == op]
    if name is not None:
        found = [c for c in found if c.name == name] or [c for c in found if c.name.startswith(name)]
    if not found:
        narrowed = ", ".join(f"{k} {v}" for k, v in (("op", op), ("name", name)) if v is not None)
        raise ConfigError(f"no case of profile {profile} fits {narrowed}; see `octavo conform list`", field="only")
    return found


def catching(fault: str, cases: Iterable[Case]) -> list[Case]:
    """The cases that are there to catch a mutant."""
    return [case for case in cases if fault in case.faults]
