"""From a step's logits to the next token of every row.

    raw logits ─ NaN? that row alone fails
        │  greedy rows with nothing else: done, the maximum was found by the same pass
        ▼  a copy of the other rows
    logits processors ─▶ allowed ids, bias, bad words, min_tokens ─▶ penalties
        ─▶ [ draw: temperature ─▶ top-k ─▶ top-p ─▶ min-p ─▶ inverse CDF at the row's own uniform number ]

The draw is the backend's `sample` op, passed in. Log probabilities are taken from the raw logits afterwards. A row's
token depends on nothing but the row: not on its neighbours, nor on their number. The ModelRunner calls this once a
step and appends each token to its row; the sampler itself keeps nothing between steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from octavo.core.sample.logprobs import PositionLogprobs, position_logprobs
from octavo.core.sample.penalties import apply_penalties
from octavo.core.sample.rng import uniform
from octavo.core.sample.state import SamplingRow

NO_TOKEN = -1
"""Stands where a row failed."""


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

    def sample(self, logits_RV: torch.Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Choose the next token of each row.

        Shapes: logits [R, V] float32, one row per entry of rows.
        Mutates: nothing; the caller appends the tokens to their rows.
        """
        top_R, greedy_R = logits_RV.max(dim=-1)
        failed = {i: _reason(top) for i, top in enumerate(top_R.tolist()) if not math.isfinite(top)}
        token_ids: list[int] = greedy_R.tolist()
        active = [i for i, row in enumerate(rows) if i not in failed and not row.takes_maximum]
        if active:
            self._sample_active(logits_RV, rows, active, token_ids, failed)
        for i in failed:
            token_ids[i] = NO_TOKEN
        return SamplerOutput(token_ids, _logprobs(logits_RV, rows, token_ids, failed), failed)

    def _sample_active(
        self,
        logits_RV: torch.Tensor,
        all_rows: Sequence[SamplingRow],
        active: Sequence[int],
        token_ids: list[int],
        failed: dict[int, str],
    ) -> None:
        """Sample the rows named by active into token_ids; rows that fail are added to failed."""
        rows = [all_rows[i] for i in active]
        edited = [i for i, row in enumerate(rows) if row.edits_logits]
        if edited or len(active) < len(all_rows):
            logits_RV = logits_RV[torch.tensor(active, device=logits_RV.device)]
        for i, reason in _edit(logits_RV, rows, edited).items():
            failed[active[i]] = reason
            logits_RV[i] = 0.0  # drawn from like any row, and thrown away
        drawn_R = torch.empty(len(rows), dtype=torch.int64, device=logits_RV.device)
        self._draw(logits_RV, *_draw_arguments(rows, logits_RV.device), out=drawn_R)
        for i, token_id in zip(active, drawn_R.tolist(), strict=True):
            token_ids[i] = token_id


def _edit(logits_RV: torch.Tensor, rows: Sequence[SamplingRow], edited: Sequence[int]) -> dict[int, str]:
    """Apply processors, masks, bias and penalties in place; returns the rows that failed, with the reason."""
    failed: dict[int, str] = {}
    for i in edited:
        try:
            rows[i].edit(logits_RV[i])
        except Exception as error:  # a logits processor is the caller's code
            failed[i] = f"a logits processor failed: {type(error).__name__}: {error}"
    penalised = {i: counts for i in edited if (counts := rows[i].counts) is not None}
    if penalised:
        indices = list(penalised)
        apply_penalties(logits_RV, indices, [rows[i].params for i in indices], list(penalised.values()))
    for i in edited:
        if i not in failed and not math.isfinite(top := float(logits_RV[i].max())):
            failed[i] = _edited_reason(top)
    return failed


def _draw_arguments(rows: Sequence[SamplingRow], device: torch.device) -> list[torch.Tensor]:
    """temperature, top_k, top_p, min_p and uniform of each row."""
    params = [row.params for row in rows]
    uniform_R = uniform(
        np.array([row.seed for row in rows], dtype=np.uint64),
        np.array([row.choice for row in rows], dtype=np.uint64),
        np.array([row.position for row in rows], dtype=np.uint64),
    )
    return [
        torch.tensor([0.0 if p.greedy else p.temperature for p in params], device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], device=device),
        torch.tensor([p.min_p for p in params], device=device),
        torch.from_numpy(uniform_R).to(device),
    ]


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


def _reason(top: float) -> str:
    """Why raw logits with this maximum can't be sampled from."""
    return "logits are NaN" if math.isnan(top) else "logits are infinite"


def _edited_reason(top: float) -> str:
    """Why logits whose maximum became this can't be sampled from."""
    if top == -math.inf:
        return "no token is left to sample: allowed_token_ids, bad_words, min_tokens and logits processors exclude all"
    return _reason(top) + " after logits processors, logit_bias and penalties"
