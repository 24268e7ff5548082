"""Log probabilities of tokens, as plain values that JSON and msgpack can carry.

They are those of the model's own distribution: taken from the raw logits, before logits processors, penalties, bias,
masks, temperature or filters, so that they mean the same whatever the sampling parameters.

No value is infinite: among the most likely tokens those of probability 0 are left out; the chosen token, which a mask
or a processor may force against the model, is never below FLOOR_LOGPROB.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOOR_LOGPROB = -9999.0
"""Stands for the logprob of a chosen token that the model gave no probability at all."""

_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """One position's log probabilities.

    Attributes:
        token_id: the token at this position.
        logprob: its natural logarithm of probability, finite.
        rank: 1 for the most likely token; tokens that tie share the best rank.
        top: (token id, logprob) of the most likely tokens, best first; as many as were asked for, or fewer.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def position_logprobs(
    logits_TV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[PositionLogprobs]:
    """Log probabilities at T positions.

    Args:
        logits_TV: raw logits, float32, none NaN; row t is the distribution that token t was taken from.
        token_ids: the T tokens chosen or given.
        num_top: how many most likely tokens to report at each position.

    For a prompt, row t is the model's output at prompt position t and token_ids[t] the prompt's token t + 1.
    Works through 64 rows at a time, so that memory stays bounded.
    """
    result: list[PositionLogprobs] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        stop = start + _CHUNK_ROWS
        result += _chunk(logits_TV[start:stop], token_ids[start:stop], num_top[start:stop])
    return result


def _chunk(logits_TV: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[PositionLogprobs]:
    import torch

    logprobs_TV = logits_TV.log_softmax(dim=-1)
    ids_T1 = torch.tensor(token_ids, device=logits_TV.device).unsqueeze(-1)
    chosen_T1 = logprobs_TV.gather(1, ids_T1)
    ranks = ((logprobs_TV > chosen_T1).sum(dim=-1) + 1).tolist()
    chosen = chosen_T1.squeeze(-1).tolist()
    width = min(max(num_top), logits_TV.shape[1])
    best = logprobs_TV.topk(width, dim=-1)
    best_values, best_ids = best.values.tolist(), best.indices.tolist()
    return [
        PositionLogprobs(
            token_id=token_ids[t],
            logprob=max(chosen[t], FLOOR_LOGPROB),
            rank=ranks[t],
            top=tuple(
                (token_id, value)
                for token_id, value in zip(best_ids[t][: num_top[t]], best_values[t], strict=False)
                if value > -torch.inf
            ),
        )
        for t in range(len(token_ids))
    ]
