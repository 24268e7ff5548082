"""Every way a vocabulary can write a bad word.

    "cat"    c─a─t    cat | ca t | c at | c a t          " cat" likewise, tokens that begin with a space included

A word blocked in its usual spelling alone comes back in another: with `exaggerated` and ` exaggerated` blocked as the
tokenizer writes them, a model goes on with ` ex agger ated`. So all cuttings of the word's bytes into tokens are
listed, fewest tokens first, up to a limit. core/sample blocks the last token of each where the others were sampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from octavo.core.text.tokenizer import Tokenizer

MAX_SPELLINGS = 512
"""Cuttings listed of one word, and as many with a leading space."""

_Edges = Sequence[Sequence[tuple[int, int]]]  # per position: (token id, position after it)


class BadWordSpeller:
    """Turns bad words into token sequences.

    Args:
        tokenizer: whose vocabulary; read through once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = ((i, tokenizer.token_bytes(i)) for i in range(tokenizer.vocab_size) if i not in tokenizer.special_ids)
        self._ids: Mapping[bytes, list[int]] = _group(pieces)
        self._longest_bytes = max(map(len, self._ids), default=0)

    def spell(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write one of the words, with or without a leading space; none empty, none twice."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.removeprefix(" ") or word
            for form in (bare, " " + bare):
                usual = self._tokenizer.encode(form, add_special_tokens=False)
                if self._bytes_of(usual) == form.encode():
                    sequences[tuple(usual)] = None
                sequences.update(dict.fromkeys(self._cuttings(form.encode())))
        return tuple(sequence for sequence in sequences if sequence)

    def _bytes_of(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, token_ids))

    def _cuttings(self, word: bytes) -> Iterator[tuple[int, ...]]:
        edges = [
            [
                (token_id, end)
                for end in range(start + 1, min(start + self._longest_bytes, len(word)) + 1)
                for token_id in self._ids.get(word[start:end], ())
            ]
            for start in range(len(word))
        ]
        fewest, most = _path_lengths(edges)
        left = MAX_SPELLINGS
        for num_tokens in range(fewest[0], most[0] + 1):
            for path in _paths(edges, fewest, most, num_tokens):
                if left == 0:
                    return
                left -= 1
                yield path


def _group(pieces: Iterable[tuple[int, bytes]]) -> dict[bytes, list[int]]:
    ids: dict[bytes, list[int]] = {}
    for token_id, piece in pieces:
        if piece:
            ids.setdefault(piece, []).append(token_id)
    return ids


def _path_lengths(edges: _Edges) -> tuple[list[int], list[int]]:
    """Per position the fewest and most tokens to the word's end; fewest > most where it can't be reached."""
    length = len(edges)
    fewest, most = [length + 1] * length + [0], [-1] * length + [0]
    for start in reversed(range(length)):
        ends = [end for _, end in edges[start] if most[end] >= 0]
        if ends:
            fewest[start] = 1 + min(fewest[end] for end in ends)
            most[start] = 1 + max(most[end] for end in ends)
    return fewest, most


def _paths(edges: _Edges, fewest: Sequence[int], most: Sequence[int], num_tokens: int) -> Iterator[tuple[int, ...]]:
    """Cuttings of the whole word into exactly num_tokens tokens."""
    open_paths: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    while open_paths:
        start, path = open_paths.pop()
        if start == len(edges):
            yield path
            continue
        left = num_tokens - len(path) - 1
        open_paths.extend(
            (end, (*path, token_id)) for token_id, end in edges[start] if fewest[end] <= left <= most[end]
        )
