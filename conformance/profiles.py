"""Profiles: named sets of cases, and when a backend meets one.

    case.profiles names the profiles that contain it; "full" contains all cases
    met:  every case of the profile that concerns the backend passes, and PagedAttention and GEMM run on its own
          kernels (or composites with one): a fallback of these never earns it

`core` allows no gaps at all; the others allow what gaps.toml declares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.conformance.case import Case
from octavo.conformance.harness.result import BAD, OWN_KERNELS, Status
from octavo.conformance.report.json import Entry
from octavo.core.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Profile:
    """A named set of cases.

    Attributes:
        purpose: one line, for `octavo conform list`.
        is_claim: it says something about a device; False for sets that only exercise the suite.
        allows_gaps: cases listed in gaps.toml don't spoil it.
        needs_determinism: every case must give the same bits twice, so the backend must declare that it does.
    """

    name: str
    purpose: str
    is_claim: bool = True
    allows_gaps: bool = True
    needs_determinism: bool = False

    def contains(self, case: Case) -> bool:
        return self.name == "full" or self.name in case.profiles

    def failures(self, entries: Sequence[Entry], *, is_deterministic: bool) -> list[str]:
        """Why the profile is not met, one line per case; empty when it is. No case at all is a failure."""
        reasons = [f"{e.id}: {e.status}: {e.detail}" for e in entries if not self.accepts(e.status, e.ran)]
        if not entries:
            reasons.append("no case was run")
        if self.needs_determinism and not is_deterministic:
            reasons.append("the backend declares itself non-deterministic")
        return reasons

    def accepts(self, status: Status, ran: Sequence[str]) -> bool:
        """Whether a case that ended so leaves the profile met. ran: "op:implementation" of what was bound."""
        if status in BAD or status is Status.UNSUPPORTED:
            return False
        if status is Status.FALLBACK:
            return not any(f"{op}:fallback" in ran for op in OWN_KERNELS)
        return status is Status.PASS or self.allows_gaps


PROFILES = {
    p.name: p
    for p in (
        Profile("tiny", "a quick set at the smallest shapes", is_claim=False),
        Profile("tiny-full", "core's parameters at shapes for interpreters", is_claim=False),
        Profile("smoke", "under a minute on two CPU cores"),
        Profile("core", "what every backend must pass; no gaps", allows_gaps=False),
        Profile("fp8kv", "8-bit floating point KV caches"),
        Profile("int8kv", "KV caches of 8-bit integers"),
        Profile("mla", "multi-head latent attention"),
        Profile("moe", "mixtures of experts"),
        Profile("quant", "quantised weights and activations"),
        Profile("lora", "low-rank adapters"),
        Profile("dist", "collectives"),
        Profile("deterministic", "the same bits every time, alone and in any batch", needs_determinism=True),
        Profile("full", "every case of the suite"),
    )
}
"""By name. Never written to."""

LEVELS = {
    p.name: p
    for p in (
        Profile("model", "tiny models' logits, through the backend's ops", allows_gaps=False),
        Profile("engine", "greedy tokens equal solo runs, through the engine", allows_gaps=False),
    )
}
"""Profiles above the ops, by name: octavo.conformance.levels. They need the engine, and are no part of "full"."""


UNCASED = {
    p.name: p
    for p in (
        Profile("compile", "kernels built ahead of time, read and judged; no device"),
        Profile("perf", "workloads timed, as shares of the device's own measured limits"),
    )
}
"""Profiles that compare no numbers and have no cases of the grid, by name: builds.py, perf.py."""


def profile_named(name: str) -> Profile:
    """A profile of either kind. Raises ConfigError for a name that neither has."""
    known = PROFILES | LEVELS | UNCASED
    if name not in known:
        raise ConfigError(f"profile {name!r} must be one of {', '.join(known)}", field="profile")
    return known[name]


def level_of(name: str) -> str | None:
    """The level that a case, a family or an op's stand-in belongs to ("engine.llama/cache"); None for cases of ops."""
    first = name.partition("/")[0].partition(".")[0]
    return first if first in LEVELS else None
