"""Logprobs of a prompt's tokens, gathered chunk by chunk.

prompt       t0   t1   t2   t3              the logits at position p score token p + 1, so a prompt of n tokens
scored by    -    p0   p1   p2              has n - 1 scored positions, and its first token none
"""

from __future__ import annotations

import torch

from octavo.core.sample.logprobs import PositionLogprobs, position_logprobs
from octavo.core.sched.output import NewRequest
from octavo.core.sched.request import Request

MAX_PROMPT_LOGITS = 64
"""Prompt positions of one request scored in one step: with a vocabulary of 256k, a row of logits is 1 MB."""


class PromptScores:
    """The scored positions of one request's prompt so far.

    Args:
        new: a request that needs prompt logprobs and starts at its first token.

    Attributes:
        num_positions: how many there will be.
        positions: those scored so far, in order.
    """

    def __init__(self, new: NewRequest) -> None:
        self._token_ids = new.token_ids[: new.num_prompt_tokens]
        self._num_top = new.sampling.prompt_logprobs or 0
        self.num_positions = new.num_prompt_tokens - 1
        self.positions: list[PositionLogprobs] = []

    def add(self, first: int, logits_RV: torch.Tensor) -> None:
        """Score positions first, first + 1, … by their logits, whose maxima are finite."""
        targets = self._token_ids[first + 1 : first + 1 + len(logits_RV)]
        self.positions.extend(position_logprobs(logits_RV, targets, [self._num_top] * len(targets)))


class PromptLogprobsLimit:
    """TokenLimit: a request that scores its prompt advances by few tokens a step, since each needs a row of logits."""

    def cap(self, request: Request, n: int, budget: int) -> int:
        """See TokenLimit."""
        return min(n, MAX_PROMPT_LOGITS) if request.needs_prompt_logprobs else n
