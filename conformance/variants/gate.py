"""The false-alarm gate: every honest variant must pass every case that concerns it.

variants of the same cases ──► cases of a profile whose op they compute, one drawing and one oracle for all of them
                               ──► any that is not a pass is a false alarm ──► a Verdict each
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.suite import select
from octavo.conformance.variants import attention, data, merge, moe, product, quantised, rows, sampling
from octavo.conformance.variants.base import Variant
from octavo.conformance.variants.shared import shared

VARIANTS: tuple[Variant, ...] = (
    *product.VARIANTS,
    *quantised.VARIANTS,
    *attention.VARIANTS,
    *merge.VARIANTS,
    *rows.VARIANTS,
    *moe.VARIANTS,
    *sampling.VARIANTS,
    *data.VARIANTS,
)


class Verdict(msgspec.Struct, kw_only=True):
    """What the suite said of a variant.

    Attributes:
        alarms: a line per case that it did not pass.
        tried: how many cases ran.
        worst: the largest share of a limit: how near the nearest alarm was.
    """

    variant: str
    what: str
    seed: int
    alarms: list[str] = []
    tried: int = 0
    worst: float = 0.0

    @property
    def is_honest(self) -> bool:
        return not self.alarms


def groups() -> list[list[Variant]]:
    """The variants, those together that run the same cases."""
    found: dict[tuple[object, ...], list[Variant]] = {}
    for variant in VARIANTS:
        found.setdefault((variant.concerns, variant.alter, variant.cases), []).append(variant)
    return list(found.values())


def try_variants(group: Sequence[Variant], seed: int, profile: str, *, only: str | None = None) -> list[Verdict]:
    """Run the cases of one of `groups`, or of a part of one, narrowed as `octavo conform --only` does."""
    verdicts = [Verdict(variant=variant.name, what=variant.what, seed=seed) for variant in group]
    for case in cases_of(group[0], profile, only):
        drawn = shared(case)
        for variant, verdict in zip(group, verdicts, strict=True):
            _try_case(variant, drawn, verdict)
    return verdicts


def try_variant(variant: Variant, seed: int, profile: str, *, only: str | None = None) -> Verdict:
    """Run one alone."""
    (verdict,) = try_variants([variant], seed, profile, only=only)
    return verdict


def _try_case(variant: Variant, case: Case, verdict: Verdict) -> None:
    backend = variant.make()
    if case.requires(Facts.of(backend.capabilities)) is not None:
        return
    verdict.tried += 1
    result = judge(case, backend, verdict.seed, peers=[variant.make() for _ in range(1, case.world)])
    verdict.worst = max(verdict.worst, *(f.worst for f in result.findings), 0.0)
    if result.status is not Status.PASS:
        verdict.alarms.append(f"{case.name}: {result.status}: {result.detail}")


def cases_of(variant: Variant, profile: str, only: str | None = None) -> list[Case]:
    """The cases that a variant is tried on; its backend leaves out those that don't concern it."""
    mine = [case for case in select(profile) if case.op in variant.concerns]
    left_out = set(variant.concerns) - {case.op for case in mine}  # core holds no latent attention.
    mine += [case for case in select("full") if case.op in left_out]
    altered = [other for case in mine if (other := variant.alter(case)) is not None] + variant.cases()
    return [case for case in altered if only is None or case.op == only or case.name.startswith(only)]
