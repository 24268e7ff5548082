"""From a step's logits to tokens: what a generating engine makes of its model's rows.

    rows of the step    | one per request that samples | positions of prompts that are scored ........ |
                          last known token was computed   prompt_logprobs: the logits at p score p + 1
                          (and one for each guess behind it: what is drawn there holds while the guesses were drawn)

The stage owns the sampling rows (parameters, tokens so far, random numbers) and the scores of prompts. Only the
ModelRunner talks to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from octavo.core.backend.opset import OpSet
from octavo.core.backend.specs import RowSpec
from octavo.core.engine.batch import StepInputs
from octavo.core.engine.prompt_scores import PromptScores
from octavo.core.engine.runner import WantedRows
from octavo.core.sample.logprobs import PositionLogprobs
from octavo.core.sample.sampler import Sampler
from octavo.core.sample.state import SamplingRow
from octavo.core.sched.output import ModelRunnerOutput, NewRequest, SampledTokens


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    """Prompt positions first, …, stop - 1 of one request, to be scored in one step; none when stop is first.

    Attributes:
        ends_prompt: the step computes the last prompt token, so that all scores are there afterwards.
    """

    request_id: str
    first: int
    stop: int
    ends_prompt: bool


@dataclass(frozen=True, slots=True)
class LogitsWork:
    """Whose the logits of a step are: a row for each of `sampling`, then the positions of `scoring`.

    Attributes:
        sampling: a request stands as often as it has rows: once, and once more for each guess.
        masks, drafts: as in SchedulerOutput.
    """

    sampling: tuple[str, ...]
    scoring: tuple[ScoredChunk, ...]
    masks: Mapping[str, bytes] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class SamplingStage:
    """An OutputStage that draws tokens.

    Args:
        opset: of the model.
        vocab_size: width of the logits.
    """

    def __init__(self, opset: OpSet, vocab_size: int) -> None:
        self._sampler = Sampler(opset.bind("sample", RowSpec(width=vocab_size, dtype=torch.float32)))
        self._rows: dict[str, SamplingRow] = {}
        self._scores: dict[str, PromptScores] = {}

    def add(self, new: NewRequest) -> None:
        """See OutputStage."""
        self._rows[new.request_id] = _sampling_row(new)
        if new.needs_prompt_logprobs:
            self._scores[new.request_id] = PromptScores(new)

    def remove(self, request_id: str) -> None:
        """See OutputStage."""
        self._rows.pop(request_id, None)
        self._scores.pop(request_id, None)

    def wanted(self, inputs: StepInputs) -> WantedRows:
        """See OutputStage: first the rows that sample, then prompt positions to be scored."""
        sampling: list[str] = []
        sampling_rows: list[int] = []
        scoring: list[ScoredChunk] = []
        scoring_rows: list[int] = []
        ends = (inputs.query_start_loc[1:] - 1).tolist()
        lengths, counts = inputs.seq_lens_B.tolist(), inputs.num_scheduled_B.tolist()
        for request_id, end, length, count, known in zip(
            inputs.request_ids, ends, lengths, counts, inputs.num_known_B.tolist(), strict=True
        ):
            if length >= known and self._rows[request_id].samples:
                sampling.extend([request_id] * (length - known + 1))
                sampling_rows.extend(range(end - (length - known), end + 1))
            if (scores := self._scores.get(request_id)) is not None:
                first = length - count
                stop = max(first, min(length, scores.num_positions))
                scoring.append(ScoredChunk(request_id, first, stop, ends_prompt=length > scores.num_positions))
                scoring_rows.extend(range(end + 1 - count, end + 1 - count + stop - first))
        work = LogitsWork(tuple(sampling), tuple(scoring), inputs.masks, inputs.drafts)
        return WantedRows((*sampling_rows, *scoring_rows), work)

    def finish(self, work: LogitsWork, rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """See OutputStage."""
        split = len(work.sampling)
        scored, unscored = self._score(work.scoring, rows_RV[split:]) if work.scoring else ({}, {})
        sampled, failed = self._sample(work, rows_RV[:split]) if work.sampling else ({}, {})
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs=scored, failed=unscored | failed)

    def _sample(self, work: LogitsWork, logits_RV: torch.Tensor) -> tuple[dict[str, SampledTokens], dict[str, str]]:
        names = work.sampling
        firsts: dict[str, int] = {}
        for row, name in enumerate(names):
            firsts.setdefault(name, row)
        drawn = self._sampler.sample(
            logits_RV,
            [self._rows[name] for name in names],
            {firsts[name]: mask for name, mask in work.masks.items() if name in firsts},
            [row - firsts[name] for row, name in enumerate(names)] if work.drafts else None,
        )
        sampled, failed = {}, {}
        for name, first in firsts.items():
            stop = first + _num_kept(drawn.token_ids[first:], work.drafts.get(name, ()))
            reasons = [reason for row, reason in drawn.failed.items() if first <= row < stop]
            if reasons:
                failed[name] = reasons[0]
                continue
            token_ids, logprobs = tuple(drawn.token_ids[first:stop]), drawn.logprobs[first:stop]
            sampled[name] = SampledTokens(token_ids, None if logprobs[0] is None else tuple(logprobs))
            for token_id in token_ids:
                self._rows[name].append(token_id)
        return sampled, failed

    def _score(
        self, scoring: Sequence[ScoredChunk], logits_RV: torch.Tensor
    ) -> tuple[dict[str, list[PositionLogprobs]], dict[str, str]]:
        """Score prompt positions; returns the prompts that are complete, and the requests that can't be scored."""
        complete, failed = {}, {}
        row = 0
        for chunk in scoring:
            scores = self._scores[chunk.request_id]
            logits_TV = logits_RV[row : row + chunk.stop - chunk.first]
            row += len(logits_TV)
            if not bool(logits_TV.amax(dim=-1).isfinite().all()):
                failed[chunk.request_id] = "logits of the prompt are NaN or infinite"
                continue
            scores.add(chunk.first, logits_TV)
            if chunk.ends_prompt:
                complete[chunk.request_id] = scores.positions
                del self._scores[chunk.request_id]
        return complete, failed


def _num_kept(drawn: Sequence[int], drafts: Sequence[int]) -> int:
    """How many of the tokens drawn at a request's rows are its own: up to the first that is not what was guessed."""
    pairs = enumerate(zip(drawn, drafts, strict=False), start=1)
    return next((count for count, (token_id, draft) in pairs if token_id != draft), len(drafts) + 1)


def _sampling_row(new: NewRequest) -> SamplingRow:
    return SamplingRow(
        new.sampling,
        new.token_ids[: new.num_prompt_tokens],
        new.token_ids[new.num_prompt_tokens :],
        choice=new.choice_index,
        end_token_ids=new.end_token_ids,
    )
