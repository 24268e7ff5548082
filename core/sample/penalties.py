"""Repetition, presence and frequency penalties.

    one row's TokenCounts                      the batch, for one step
    ids     [ 17, 4, 9, … ]  each once         rows' ids side by side ─▶ gather from logits
    counts  [  0, 2, 1, … ]  output only                              ─▶ penalise ─▶ scatter back

A row's counts grow by one token at a time and are never recounted; a step touches only the ids that occurred, never
the vocabulary. The row (state.py) owns its counts; the sampler passes them here.

Source: Keskar et al. 2019 (CTRL) for repetition; OpenAI's API for presence and frequency.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.base.params import SamplingParams

_FIRST_CAPACITY = 64


class TokenCounts:
    """How often each token occurred in one row's output, and which occurred at all.

    Args:
        prompt_token_ids: seen, but not counted.
    """

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)

    def add(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slot_of.get(token_id)
        if slot is None:
            slot = self._slot_of[token_id] = len(self._slot_of)
            if slot >= len(self._ids):
                self._grow()
            self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Ids that occurred in prompt or output, each once."""
        return self._ids[: len(self._slot_of)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """Occurrences in the output, in the order of `ids`; 0 for ids of the prompt alone."""
        return self._counts[: len(self._slot_of)]

    def _grow(self) -> None:
        more = max(_FIRST_CAPACITY, len(self._ids))
        self._ids = np.concatenate([self._ids, np.zeros(more, dtype=np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.float32)])


def apply_penalties(
    logits_RV: torch.Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Penalise, in place, the tokens that occurred.

    Args:
        logits_RV: contiguous float32.
        rows: row of logits that each entry of params and counts is about.

    Repetition: positive logits are divided by the penalty, others multiplied; prompt and output tokens alike.
    Presence is taken off once, frequency per occurrence; output tokens only.
    """
    lengths = [len(count.ids) for count in counts]
    vocab_size = logits_RV.shape[1]
    flat = np.concatenate([count.ids + row * vocab_size for row, count in zip(rows, counts, strict=True)])
    count = np.concatenate([entry.counts for entry in counts])
    index = _tensor_like(logits_RV, flat)
    x = logits_RV.view(-1)[index]
    repetition = _tensor_like(logits_RV, _spread([p.repetition_penalty for p in params], lengths))
    x = (x / repetition).where(x > 0, x * repetition)
    addend = count * _spread([p.frequency_penalty for p in params], lengths)
    addend += (count > 0) * _spread([p.presence_penalty for p in params], lengths)
    logits_RV.view(-1)[index] = x - _tensor_like(logits_RV, addend)


def _spread(values: Sequence[float], lengths: Sequence[int]) -> npt.NDArray[np.float32]:
    """Each row's value, once for each of its ids."""
    return np.repeat(np.array(values, dtype=np.float32), lengths)


def _tensor_like(logits_RV: torch.Tensor, values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(values).to(logits_RV.device)
