"""The false-alarm gate: every honest variant must pass every case that concerns it.

variant ──► cases of a profile whose op it computes ──► any that is not a pass is a false alarm ──► Verdict
"""

from __future__ import annotations

import msgspec

from octavo.conformance.case import Case
from octavo.conformance.facts import Facts
from octavo.conformance.harness.judge import judge
from octavo.conformance.harness.result import Status
from octavo.conformance.suite import select
from octavo.conformance.variants import attention, data, merge, moe, product, quantised, rows, sampling
from octavo.conformance.variants.base import Variant

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


def try_variant(variant: Variant, seed: int, profile: str, *, only: str | None = None) -> Verdict:
    """Run a variant's cases of a profile, narrowed as `octavo conform --only` does."""
    verdict = Verdict(variant=variant.name, what=variant.what, seed=seed)
    backend = variant.make()
    facts = Facts.of(backend.capabilities)
    for case in _cases(variant, profile, only):
        if case.requires(facts) is not None:
            continue
        verdict.tried += 1
        result = judge(case, backend, seed, peers=[variant.make() for _ in range(1, case.world)])
        verdict.worst = max(verdict.worst, *(f.worst for f in result.findings), 0.0)
        if result.status is not Status.PASS:
            verdict.alarms.append(f"{case.name}: {result.status}: {result.detail}")
    return verdict


def _cases(variant: Variant, profile: str, only: str | None) -> list[Case]:
    mine = [case for case in select(profile) if case.op in variant.concerns]
    left_out = set(variant.concerns) - {case.op for case in mine}  # core holds no latent attention.
    mine += [case for case in select("full") if case.op in left_out]
    altered = [other for case in mine if (other := variant.alter(case)) is not None] + variant.cases()
    return [case for case in altered if only is None or case.op == only or case.name.startswith(only)]
