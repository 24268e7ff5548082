"""Which tokens a part of a reply came from.

    tokens   │ <think> │ Hm │ , 4 │ </think> │ The │ answer │
    bytes      <think>   Hm   , 4   </think>   The   answer
    take("Hm, 4")        └───────┘                              tokens 1 to 2
    take("The answer")                         └──────────┘     tokens 4 to 5

Parsers see text alone and leave marks out, so the parts are looked for in the tokens' bytes, in the order they come.
Where a part is not found as it is (half characters, say), it is given all tokens since the last one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class TokenTrack:
    """The tokens of one choice's text, in their order."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends: list[int] = []  # where each token's bytes end
        self._at = 0  # behind the last part
        self._next = 0  # the first token that no part has

    def add(self, data: bytes) -> None:
        """The next token's bytes."""
        self._bytes += data
        self._ends.append(len(self._bytes))

    def take(self, text: str) -> range:
        """The tokens of the next part; those before it belong to none. A token that two parts share is the first's."""
        wanted = text.encode()
        place = self._bytes.find(wanted, self._at)
        first = self._next if place < 0 else bisect_right(self._ends, place, self._next)
        self._at = len(self._bytes) if place < 0 else place + len(wanted)
        self._next = min(bisect_left(self._ends, self._at, first) + 1, len(self._ends))
        return range(first, self._next)
