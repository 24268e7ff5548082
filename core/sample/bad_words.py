"""Keeping token sequences out of an output.

    sequences      [24098]      [888, 12895, 483]
    by prefix      () -> 24098  (888, 12895) -> 483

A sequence's last token is blocked exactly when the output ends with the tokens before it, so that other words with the
same beginning stay possible. Nothing is remembered between steps, so a rebuilt row blocks the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BadWords:
    """Sequences that must not appear in an output.

    Args:
        sequences: token ids, each at least one; every spelling of every word.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last_ids: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in sequences:
            self._last_ids.setdefault(tuple(prefix), []).append(last)
        self._lengths = sorted({len(prefix) for prefix in self._last_ids})

    def blocked(self, output_token_ids: Sequence[int]) -> list[int]:
        """Ids that would complete a sequence as the next token; may repeat."""
        ids: list[int] = []
        for length in self._lengths:
            if length > len(output_token_ids):
                break
            end = tuple(output_token_ids[len(output_token_ids) - length :])
            ids += self._last_ids.get(end, ())
        return ids
