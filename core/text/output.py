"""The text of one choice while it is being generated.

    token ids ──▶ Detokenizer ──characters──▶ StopMatcher ──▶ deltas

Owned by whoever talks to the client (the engine's output side), one per choice; it never touches the scheduler. When
`stop_string` is set, that owner aborts the request in the engine with reason "stop".
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.base.params import SamplingParams
from octavo.core.text.detokenizer import Detokenizer, hidden_ids
from octavo.core.text.stop import StopMatcher
from octavo.core.text.tokenizer import Tokenizer


class OutputText:
    """Text and stop strings of one choice.

    Args:
        tokenizer: whose ids.
        params: stop, include_stop_str_in_output, min_tokens and what says which special tokens stay are read.
        continuation: the ids go on from a prompt (see Detokenizer).

    Attributes:
        num_tokens: tokens taken in, up to and including the one that completed a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, *, continuation: bool = True) -> None:
        self._detokenizer = Detokenizer(tokenizer, hidden_ids=hidden_ids(tokenizer, params), continuation=continuation)
        self._stop = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._parts: list[str] = []
        self.num_tokens = 0

    @property
    def text(self) -> str:
        """All that was released so far."""
        return "".join(self._parts)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._stop.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text they release. Tokens after a stop string are ignored.

        A token that ended the choice by its id (EOS, stop_token_ids) is not part of the text: leave it out.
        """
        parts = []
        for token_id in token_ids:
            if self._stop.matched is not None:
                break
            self.num_tokens += 1
            characters = self._detokenizer.push((token_id,))
            parts.append(self._stop.push(characters, may_stop=self.num_tokens >= self._min_tokens))
        return self._release("".join(parts))

    def finish(self) -> str:
        """End the text (length, EOS, abort); returns what was still held back."""
        if self._stop.matched is not None:
            return ""
        tail = self._stop.push(self._detokenizer.flush(), may_stop=self.num_tokens >= self._min_tokens)
        return self._release(tail + self._stop.flush())

    def _release(self, delta: str) -> str:
        self._parts.append(delta)
        return delta
