"""Which key each row of a needle case looks for, and which one it must find.

keys       0 … | first hidden by the window | … visible … | the row's own | future … L-1
targets    0, both sides of block edges, both sides of the window's edge, the row's own and the next, the last,
           and 4,095 | 4,096 where a request is that long
decoys     a key that every row sees, for each target that some row doesn't: the decoy must win there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.conformance.draw import Draw
from octavo.conformance.grid.batch import Request
from octavo.conformance.oracle.attention import Rule

MOST_TARGETS = 10
"""More codes than this are hard to keep apart at 32 elements."""


@dataclass(frozen=True)
class Needle:
    """One request's.

    Attributes:
        targets: keys that have a code of their own. decoys: target -> its decoy.
        chosen: [Q][H], the target whose code the row carries; None for a row that sees nothing.
        winners: [Q][H], the key whose value must come out.
    """

    targets: tuple[int, ...]
    decoys: Mapping[int, int]
    chosen: tuple[tuple[int | None, ...], ...]
    winners: tuple[tuple[int | None, ...], ...]


def find_needles(request: Request, block_size: int, rule: Rule, num_heads: int, draw: Draw) -> Needle:
    """Spread the targets over rows and heads, each row starting with another."""
    spans = [_span(request, row, rule) for row in range(request.num_rows)]
    targets = _targets(request, block_size, spans, draw)
    hidden = [t for t in targets if any(not lo <= t < hi for lo, hi in spans)]
    decoys = _decoys(hidden, targets, spans)
    chosen: list[tuple[int | None, ...]] = []
    winners: list[tuple[int | None, ...]] = []
    for row, (lo, hi) in enumerate(spans):
        usable = [t for t in targets if lo <= t < hi or t in decoys]
        picks = [usable[(row * num_heads + h) % len(usable)] if usable else None for h in range(num_heads)]
        chosen.append(tuple(picks))
        winners.append(tuple(t if t is None or lo <= t < hi else decoys[t] for t in picks))
    return Needle(targets, decoys, tuple(chosen), tuple(winners))


def _span(request: Request, row: int, rule: Rule) -> tuple[int, int]:
    """First and one past the last key that a row sees."""
    position = request.num_keys - request.num_rows + row
    stop = max(0, min(position + 1, request.num_keys)) if rule.causal else request.num_keys
    first = 0 if rule.window is None else max(0, position - rule.window + 1)
    return min(first, stop), stop


def _targets(request: Request, block_size: int, spans: list[tuple[int, int]], draw: Draw) -> tuple[int, ...]:
    """Edges first; what is over the number goes, by lot, but never a row's only visible key."""
    length = request.num_keys
    if not length or not spans:
        return ()
    own = [hi - 1 for lo, hi in spans if hi - lo == 1]
    (first_lo, first_hi), (last_lo, last_hi) = spans[0], spans[-1]
    last_block = (length - 1) // block_size * block_size
    edges = [first_lo, first_lo - 1, last_lo, last_lo - 1, first_hi - 1, first_hi, last_hi - 1, 0, length - 1]
    edges += [block_size - 1, block_size, last_block - 1, last_block, 16, 17, 4095, 4096, length // 2]
    wanted = list(dict.fromkeys(k for k in edges if 0 <= k < length and k not in own))
    kept = sorted(draw.permutation(len(wanted))[: max(MOST_TARGETS - len(set(own)), 2)])
    return tuple(dict.fromkeys([*own, *(wanted[i] for i in kept)]))


def _decoys(hidden: list[int], targets: tuple[int, ...], spans: list[tuple[int, int]]) -> dict[int, int]:
    """A decoy of its own for as many hidden targets as keys are seen by all rows and are no targets themselves."""
    lo, hi = max((s[0] for s in spans), default=0), min((s[1] for s in spans), default=0)
    seen_by_all = [k for k in range(max(lo, hi - 64), hi) if k not in targets]
    return dict(zip(hidden, reversed(seen_by_all), strict=False))
