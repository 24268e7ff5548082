"""What one comparison found: by how much of its bound the worst element is off, and where.

    share = |error| / bound of the worst element      ≤ 1 passes, infinite for a difference in the exact lane

Made by the lanes (`conformance/lanes/`), gathered by a trial's `check`, kept in the case's result.
"""

from __future__ import annotations

import math

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison of one output.

    Attributes:
        lane: "exact", "probe", "statistical" or "distribution".
        output: what was compared, by the trial's name for it.
        compared: number of elements; 0 never passes.
        share: the worst element's error as a share of its bound; inf for a forbidden difference.
        index: of that element.
        rms: rms error as a share of its limit, where the lane has one.
        gain: |gain - 1| as a share of its limit, where the lane has one.
        plain: rms error over that of a plain implementation in the same dtype, where known.
        message: what differs, for people.
    """

    lane: str
    output: str
    compared: int
    share: float = 0.0
    index: tuple[int, ...] = ()
    rms: float | None = None
    gain: float | None = None
    plain: float | None = None
    message: str = ""

    @property
    def worst(self) -> float:
        """The largest of all shares; NaN counts as infinite."""
        shares = [s for s in (self.share, self.rms, self.gain) if s is not None]
        return max(math.inf if math.isnan(s) else s for s in shares)

    @property
    def ok(self) -> bool:
        return self.compared > 0 and self.worst <= 1.0
