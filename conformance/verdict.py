"""A run's verdict, from nothing but what its report holds: whoever has the report comes to the same one.

Run (profile, only, isolated, capabilities) ─┐
entries, number of cases that were not run  ─┼──► Verdict      session.py writes it, audit.py compares it
what a profile without cases adds           ─┘
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.conformance.case import COMMUNICATOR, Case
from octavo.conformance.profiles import LEVELS, profile_named
from octavo.conformance.report.json import Entry, Run, Verdict
from octavo.conformance.suite import select
from octavo.core.backend import OP_NAMES


def verdict(
    run: Run, entries: Sequence[Entry], *, no_claim: str = "", not_run: int = 0, budget_s: float = math.inf
) -> Verdict:
    """The profile's verdict.

    Args:
        no_claim: why it says nothing about a device, beside what the run tells.
        not_run: cases that there was no time for.
        budget_s: the time that there was, for the reason's words.
    """
    profile = profile_named(run.profile)
    reasons = profile.failures(entries, is_deterministic=run.capabilities.deterministic)
    if not_run:
        reasons.append(f"{not_run} cases were not run: the budget of {budget_s:g} s was spent")
    no_claim = no_claim_of(run) or no_claim
    return Verdict(profile=profile.name, is_met=not reasons, is_claim=not no_claim, no_claim=no_claim, reasons=reasons)


def no_claim_of(run: Run) -> str:
    """Why the run says nothing about a device; empty when it does."""
    profile = profile_named(run.profile)
    if run.capabilities.is_emulated:
        return f"the device was not there, another one did its work ({run.capabilities.device_name})"
    if run.only:
        return f"it was narrowed to {run.only}"
    if not profile.is_claim:
        return f"the profile {profile.name} only exercises the suite"
    return "cases of several ranks need worker processes" if _lacks_groups(run) else ""


def chosen(profile: str, only: str | None) -> list[Case]:
    """The cases of a profile, narrowed to an op, a case or a prefix. Raises ConfigError when there are none."""
    op, name = (only, None) if only in (*OP_NAMES, COMMUNICATOR, *LEVELS) else (None, only)
    return select(profile, op=op, name=name)


def _lacks_groups(run: Run) -> bool:
    """Whether cases that concern the backend were left out for want of a process per rank."""
    return not run.isolated and any(
        c.world > 1 and c.requires(run.capabilities) is None for c in chosen(run.profile, None)
    )
