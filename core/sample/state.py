"""What the sampler knows of one choice.

    SamplingRow   params, seed, choice ── fixed
                  output_token_ids     ── grows by append()
                  counts               ── grows with it (only when a penalty is set)

The InputBatch owns the rows, one per running choice. A row is made of the request's parameters and tokens alone: after
a preemption it is built again with the outputs so far and then samples exactly as it would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.base.params import MAX_SEED, SamplingParams
from octavo.core.sample.bad_words import BadWords
from octavo.core.sample.bitmask import allows_others
from octavo.core.sample.penalties import TokenCounts


class SamplingRow:
    """Sampling state of one choice.

    Args:
        params: validated against the vocabulary; the seed was drawn at submission, and bad words are token sequences.
        prompt_token_ids: the prompt.
        output_token_ids: sampled so far; copied.
        choice: index among the request's n choices.
        end_token_ids: ids that end the choice (EOS unless ignored, stop ids); held back before min_tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Iterable[int] = (),
        *,
        choice: int = 0,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        self.params = params
        self.seed = (params.seed or 0) & MAX_SEED
        self.choice = choice
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.counts = TokenCounts(prompt_token_ids) if params.penalises else None
        self._end_ids = np.unique(np.array([*end_token_ids], dtype=np.int64))
        self._bad_words = BadWords(params.bad_words_token_ids)
        self._allowed_ids = (
            None if params.allowed_token_ids is None else np.unique(np.array(params.allowed_token_ids, dtype=np.int64))
        )
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Take in the token sampled at this step."""
        self.output_token_ids.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)

    @property
    def samples(self) -> bool:
        """Whether the choice wants tokens at all; max_tokens 0 only scores the prompt."""
        return self.params.max_tokens != 0

    @property
    def position(self) -> int:
        """Which output token comes next, from 0."""
        return len(self.output_token_ids)

    @property
    def holds_back_end(self) -> bool:
        """Whether min_tokens still forbids the ids that end the choice."""
        return self.position < self.params.min_tokens and len(self._end_ids) > 0

    @property
    def edits_logits(self) -> bool:
        """Whether anything but temperature and filters changes this step's logits."""
        return self.params.edits_logits or self.holds_back_end

    @property
    def takes_maximum(self) -> bool:
        """Whether this step's token is simply the most likely one."""
        return self.params.greedy and not self.edits_logits

    def edit(self, logits_V: torch.Tensor, mask: bytes | None = None) -> None:
        """Apply, in place, everything of this row but penalties and mask: processors, allowed ids, bias, blocked ids.

        Args:
            mask: a bit for each token that the row's grammar allows. Where it leaves only ids that end the choice,
                these are not held back: the form goes before min_tokens.

        Raises whatever a logits processor raises.
        """
        for processor in self.params.logits_processors:
            result = processor(self.prompt_token_ids, self.output_token_ids, logits_V)
            if result is not logits_V:
                logits_V.copy_(result)
        if self._allowed_ids is not None:
            ids = _index(self._allowed_ids, logits_V)
            allowed = logits_V[ids]
            logits_V.fill_(-torch.inf)[ids] = allowed
        if len(self._bias_ids):
            ids = _index(self._bias_ids, logits_V)
            logits_V[ids] += torch.from_numpy(self._bias).to(logits_V.device)
        blocked = np.array(self._bad_words.blocked(self.output_token_ids), dtype=np.int64)
        if self.holds_back_end and (mask is None or allows_others(mask, self._end_ids)):
            blocked = np.concatenate([blocked, self._end_ids])
        if len(blocked):
            # A tokenizer may know more ids than the model has logits.
            logits_V[_index(blocked[blocked < len(logits_V)], logits_V)] = -torch.inf


def _index(ids: npt.NDArray[np.int64], logits_V: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ids).to(logits_V.device)
