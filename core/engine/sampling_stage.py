"""From a step's logits to tokens: what a generating engine makes of its model's rows.

    rows of the step    | one per request that samples | positions of prompts that are scored ........ |
                          last known token was computed   prompt_logprobs: the logits at p score p + 1

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
    """Whose the logits of a step are: `sampling` requests, one row each, then the positions of `scoring`.

    Attributes:
        masks: request id -> tokens that it may draw, as in SchedulerOutput.
    """

    sampling: tuple[str, ...]
    scoring: tuple[ScoredChunk, ...]
    masks: Mapping[str, bytes] = field(default_factory=dict)


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
            if length == known and self._rows[request_id].samples:
                sampling.append(request_id)
                sampling_rows.append(end)
            if (scores := self._scores.get(request_id)) is not None:
                first = length - count
                stop = max(first, min(length, scores.num_positions))
                scoring.append(ScoredChunk(request_id, first, stop, ends_prompt=length > scores.num_positions))
                scoring_rows.extend(range(end + 1 - count, end + 1 - count + stop - first))
        return WantedRows((*sampling_rows, *scoring_rows), LogitsWork(tuple(sampling), tuple(scoring), inputs.masks))

    def finish(self, work: LogitsWork, rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """See OutputStage."""
        split = len(work.sampling)
        scored, unscored = self._score(work.scoring, rows_RV[split:]) if work.scoring else ({}, {})
        sampled, failed = self._sample(work, rows_RV[:split]) if work.sampling else ({}, {})
        return ModelRunnerOutput(sampled=sampled, prompt_logprobs=scored, failed=unscored | failed)

    def _sample(self, work: LogitsWork, logits_RV: torch.Tensor) -> tuple[dict[str, SampledTokens], dict[str, str]]:
        request_ids = work.sampling
        masks = {row: work.masks[request_id] for row, request_id in enumerate(request_ids) if request_id in work.masks}
        drawn = self._sampler.sample(logits_RV, [self._rows[request_id] for request_id in request_ids], masks)
        failed = {request_ids[row]: reason for row, reason in drawn.failed.items()}
        sampled = {}
        for row, request_id in enumerate(request_ids):
            if request_id in failed:
                continue
            token_id, logprobs = drawn.token_ids[row], drawn.logprobs[row]
            sampled[request_id] = SampledTokens((token_id,), None if logprobs is None else (logprobs,))
            self._rows[request_id].append(token_id)
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


def _sampling_row(new: NewRequest) -> SamplingRow:
    return SamplingRow(
        new.sampling,
        new.token_ids[: new.num_prompt_tokens],
        new.token_ids[new.num_prompt_tokens :],
        choice=new.choice_index,
        end_token_ids=new.end_token_ids,
    )
