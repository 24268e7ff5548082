"""From a step's logits to the next token of every row.

    raw logits ─▶ [ draw: temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ inverse CDF at the row's own uniform number ]
        │         a row without a finite maximum (NaN) fails alone; a row without edits is done
        ▼  a copy of the rows with edits
    logits processors ─▶ allowed ids, bias, bad words, min_tokens ─▶ grammar's mask ─▶ penalties ─▶ draw

The draw is the backend's `sample` op, passed in. Log probabilities are taken from the raw logits afterwards. A row's
token depends on nothing but the row: not on its neighbours, nor on their number. The ModelRunner calls this once a
step and appends each token to its row; the sampler itself keeps nothing between steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.sample.bitmask import apply_masks
from octavo.core.sample.logprobs import PositionLogprobs, position_logprobs
from octavo.core.sample.penalties import apply_penalties
from octavo.core.sample.rng import uniform
from octavo.core.sample.state import SamplingRow

NO_TOKEN = -1
"""Stands where a row failed."""

NO_MASKS: Mapping[int, bytes] = MappingProxyType({})


class Draw(Protocol):
    """The backend's op `sample` (core/backend/ops.py states its meaning)."""

    def __call__(
        self,
        logits_RV: torch.Tensor,
        temperature_R: torch.Tensor,
        top_k_R: torch.Tensor,
        top_p_R: torch.Tensor,
        min_p_R: torch.Tensor,
        uniform_R: torch.Tensor,
        *,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What one step sampled.

    Attributes:
        token_ids: one per row; NO_TOKEN where the row failed.
        logprobs: one per row; None where not asked for, or failed.
        failed: row -> why; the request ends with an error, its neighbours go on.
    """

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None]
    failed: dict[int, str]


class Sampler:
    """Samples one token per row.

    Args:
        draw: the backend's `sample` op, bound or plain.
    """

    def __init__(self, draw: Draw) -> None:
        self._draw = draw

    def sample(
        self,
        logits_RV: torch.Tensor,
        rows: Sequence[SamplingRow],
        masks: Mapping[int, bytes] = NO_MASKS,
        ahead: Sequence[int] | None = None,
    ) -> SamplerOutput:
        """Choose the next token of each row.

        Args:
            ahead: how many positions behind the row's next one each of these logits stands (guesses are between);
                None: all are at the next one. Such rows have no edits, which would have to know the guesses.
            masks: row -> a bit for each token that its grammar allows; rows without a grammar are not in it.

        Shapes: logits [R, V] float32, one row per entry of rows.
        Mutates: nothing; the caller appends the tokens to their rows.
        """
        changed = [row.edits_logits or i in masks for i, row in enumerate(rows)]
        draws = [not row.takes_maximum and not edits for row, edits in zip(rows, changed, strict=True)]
        token_ids = self._drawn(logits_RV, rows, draws, ahead)
        failed = {i: _reason(logits_RV[i]) for i, token_id in enumerate(token_ids) if token_id == NO_TOKEN}
        edited = [i for i, edits in enumerate(changed) if edits and i not in failed]
        if edited:
            self._sample_edited(logits_RV, rows, edited, masks, token_ids, failed)
        return SamplerOutput(token_ids, _logprobs(logits_RV, rows, token_ids, failed), failed)

    def _sample_edited(
        self,
        logits_RV: torch.Tensor,
        all_rows: Sequence[SamplingRow],
        edited: Sequence[int],
        masks: Mapping[int, bytes],
        token_ids: list[int],
        failed: dict[int, str],
    ) -> None:
        """Sample the rows named by edited into token_ids, from a copy; rows that fail are added to failed."""
        rows = [all_rows[i] for i in edited]
        copy_RV = logits_RV[torch.tensor(edited, device=logits_RV.device)]
        reasons = _edit(copy_RV, rows, {k: masks[i] for k, i in enumerate(edited) if i in masks})
        drawn = self._drawn(copy_RV, rows, [not row.params.greedy for row in rows])
        for k, i in enumerate(edited):
            token_ids[i] = NO_TOKEN if k in reasons else drawn[k]
            if token_ids[i] == NO_TOKEN:
                failed[i] = reasons.get(k) or _edited_reason(copy_RV[k])

    def _drawn(
        self,
        logits_RV: torch.Tensor,
        rows: Sequence[SamplingRow],
        draws: Sequence[bool],
        ahead: Sequence[int] | None = None,
    ) -> list[int]:
        """The backend's draw; a row that does not draw takes its maximum. NO_TOKEN for logits without a finite one."""
        ids_R = torch.empty(len(rows), dtype=torch.int64, device=logits_RV.device)
        positions = np.array([row.position for row in rows], dtype=np.uint64)
        if ahead is not None:
            positions += np.array(ahead, dtype=np.uint64)
        self._draw(logits_RV, *_draw_arguments(rows, draws, positions, logits_RV.device), out=ids_R)
        token_ids: list[int] = ids_R.tolist()
        return token_ids


def _edit(logits_RV: torch.Tensor, rows: Sequence[SamplingRow], masks: Mapping[int, bytes]) -> dict[int, str]:
    """Apply processors, masks, bias and penalties in place; returns the rows whose processor failed, and why."""
    failed: dict[int, str] = {}
    for i, row in enumerate(rows):
        try:
            row.edit(logits_RV[i], masks.get(i))
        except Exception as error:  # a logits processor is the caller's code
            failed[i] = f"a logits processor failed: {type(error).__name__}: {error}"
    if masks:
        apply_masks(logits_RV, masks)
    penalised = {i: counts for i, row in enumerate(rows) if (counts := row.counts) is not None}
    if penalised:
        indices = list(penalised)
        apply_penalties(logits_RV, indices, [rows[i].params for i in indices], list(penalised.values()))
    return failed


def _draw_arguments(
    rows: Sequence[SamplingRow], draws: Sequence[bool], positions: npt.NDArray[np.uint64], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """temperature, top_k, top_p, min_p and uniform of each row; temperature 0 where a row takes its maximum."""
    if not any(draws):
        zeros_R = torch.zeros(len(rows), device=device)
        return zeros_R, zeros_R.long(), zeros_R, zeros_R, zeros_R
    params = [row.params for row in rows]
    uniform_R = uniform(
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([row.choice for row in rows], dtype=np.uint64),
        positions,
    )
    return (
        torch.tensor([p.temperature if drawn else 0.0 for p, drawn in zip(params, draws, strict=True)], device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
        torch.from_numpy(uniform_R).to(device),
    )


def _logprobs(
    logits_RV: torch.Tensor, rows: Sequence[SamplingRow], token_ids: Sequence[int], failed: dict[int, str]
) -> list[PositionLogprobs | None]:
    """Raw log probabilities of the rows that ask for them."""
    wanted = {i: n for i, row in enumerate(rows) if (n := row.params.logprobs) is not None and i not in failed}
    result: list[PositionLogprobs | None] = [None] * len(rows)
    if wanted:
        asked_RV = logits_RV[torch.tensor(list(wanted), device=logits_RV.device)]
        found = position_logprobs(asked_RV, [token_ids[i] for i in wanted], list(wanted.values()))
        for i, entry in zip(wanted, found, strict=True):
            result[i] = entry
    return result


def _reason(logits_V: torch.Tensor) -> str:
    """Why raw logits without a finite maximum can't be sampled from."""
    return "logits are NaN" if bool(logits_V.isnan().any()) else "logits are infinite"


def _edited_reason(logits_V: torch.Tensor) -> str:
    """Why edited logits without a finite maximum can't be sampled from."""
    if float(logits_V.max()) == -math.inf:
        return (
            "no token is left to sample: structured output, allowed_token_ids, bad_words, min_tokens and logits "
            "processors exclude all"
        )
    return _reason(logits_V) + " after logits processors, logit_bias and penalties"
