"""Token ids to text, a few at a time.

    ids --bytes of each token--> [ incomplete tail of a character, at most 3 bytes ] --whole characters--> delta

One Detokenizer belongs to one choice. It holds back the start of a character until the rest is there, never sends a
character in parts, and does work proportional to the new tokens alone. Joined deltas, flush included, equal
`Tokenizer.decode` of all ids, whatever the ids and however they are cut: both are UTF-8 decodings of the same bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.core.base.params import SamplingParams
from octavo.core.text.tokenizer import Tokenizer


def hidden_ids(tokenizer: Tokenizer, params: SamplingParams) -> frozenset[int]:
    """The tokens that a request leaves out of its text."""
    if not params.skip_special_tokens:
        return frozenset()
    return tokenizer.special_ids.difference(params.visible_special_token_ids)


class Detokenizer:
    """The text of one growing sequence of token ids.

    Args:
        tokenizer: whose ids.
        hidden_ids: tokens that are left out of the text; None: the special ones.
        continuation: the ids go on from a prompt. Then a leading space is part of the text; otherwise it is dropped
            where the tokenizer's full decode drops it (sentencepiece with a space put before every text).
    """

    def __init__(
        self, tokenizer: Tokenizer, *, hidden_ids: frozenset[int] | None = None, continuation: bool = False
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if hidden_ids is None else hidden_ids
        self._strip_next = tokenizer.strips_leading_space and not continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the characters they completed."""
        data = b"".join([self._token_bytes(i) for i in token_ids if i not in self._hidden])
        if self._strip_next and data:
            data = data.removeprefix(b" ")
            self._strip_next = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """End the text: U+FFFD for a character that was begun and never completed."""
        return self._decoder.decode(b"", final=True)
