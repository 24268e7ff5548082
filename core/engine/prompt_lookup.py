"""Guesses the next tokens of a request from its own text: what followed the last time it ended like this.

    ... the cat sat on the mat . the cat sat
                       └── guess   └── longest tail (up to MAX_TAIL tokens) that stood before

Text that quotes its prompt (summaries, edits, code, lists) is guessed well, at the cost of a scan: no second model.

Source: Saxena 2023, "Prompt lookup decoding".
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from octavo.core.sched.request import Request

MIN_TAIL, MAX_TAIL = 2, 4
"""Tokens that must have stood together before: one alone recurs by chance, and longer ones decide little more."""


class PromptLookup:
    """A Drafter that needs nothing but the request's tokens. It keeps a copy of them as an array, which grows."""

    def __init__(self) -> None:
        self._texts: dict[str, _Text] = {}

    def propose(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """See Drafter."""
        text = self._texts.setdefault(request.request_id, _Text())
        text.catch_up(request.token_ids)
        return text.continuation(num_tokens)

    def forget(self, request_id: str) -> None:
        """See Drafter."""
        self._texts.pop(request_id, None)


class _Text:
    """Token ids in an array with room to grow."""

    def __init__(self) -> None:
        self._ids = np.empty(256, dtype=np.int64)
        self._length = 0

    def catch_up(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came since the last call."""
        if len(token_ids) > len(self._ids):
            larger = np.empty(2 * len(token_ids), dtype=np.int64)
            larger[: self._length] = self._ids[: self._length]
            self._ids = larger
        self._ids[self._length : len(token_ids)] = list(islice(token_ids, self._length, None))
        self._length = len(token_ids)

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed the latest place where the longest tail stood before; () where none of MIN_TAIL did."""
        ids = self._ids[: self._length]
        end = self._last_match(ids)
        if end is None:
            return ()
        # Where the text repeats itself up to its end, the guess runs on into itself.
        period = self._length - end
        return tuple(ids[end + np.arange(num_tokens) % period].tolist())

    def _last_match(self, ids: npt.NDArray[np.int64]) -> int | None:
        """The position behind the latest earlier occurrence of the longest tail."""
        found = None
        ends = np.arange(1, self._length)
        for length in range(1, MAX_TAIL + 1):
            ends = ends[ends >= length]
            ends = ends[ids[ends - length] == ids[-length]]
            if not len(ends):
                break
            if length >= MIN_TAIL:
                found = int(ends[-1])
        return found
