"""What a report must share with the suite that reads it: two versions, and a hash of each profile's cases.

SUITE_VERSION    of the measure: raised when a bound, an oracle, a drawing or a defence changes what a figure means
SPEC_VERSION     of the semantics: raised when what is right changes
must_pass_hash   of a profile's cases: changes when one comes, goes or is renamed
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from octavo.conformance.case import Case
from octavo.conformance.profiles import Profile

SUITE_VERSION = 1
SPEC_VERSION = 1


def must_pass_hash(profile: Profile, cases: Iterable[Case]) -> str:
    """16 hex digits over the names, ops and lanes of the profile's cases, whatever their order."""
    lines = sorted(f"{c.name} {c.op} {','.join(c.lanes)}" for c in cases if profile.contains(c))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
