"""How many of a reply's tokens were reasoning, for its usage: those whose text the parser gave on as such.

Marks count as neither reasoning nor answer. A token that ends reasoning and begins the answer counts.
"""

from __future__ import annotations

from octavo.core.base.params import SamplingParams
from octavo.core.engine.outputs import CompletionOutput
from octavo.core.serve.logprobs import num_text_tokens
from octavo.core.serve.token_track import TokenTrack
from octavo.core.text.detokenizer import hidden_ids
from octavo.core.text.tokenizer import Tokenizer


class ReasoningCount:
    """The count over all choices of one reply.

    Args:
        tokenizer: whose ids.
        params: of the conversation.

    Attributes:
        tokens: counted so far.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._hidden = hidden_ids(tokenizer, params)
        self._tracks = [TokenTrack() for _ in range(params.n)]
        self.tokens = 0

    def take(self, choice: CompletionOutput, reasoning: str) -> None:
        """Take in a choice, or a piece of one, and the reasoning that it brought."""
        track = self._tracks[choice.index]
        for token_id in choice.token_ids[: num_text_tokens(choice)]:
            if token_id not in self._hidden:
                track.add(self._token_bytes(token_id))
        if reasoning:
            self.tokens += len(track.take(reasoning))
