"""The committed references, and the comparison with them.

reference   t0 t1 t2 t3 t4 …      what Hugging Face takes, and how far its best logit is ahead of the second
found       t0 t1 x               x differs: excused only where the reference's own gap is at most TIE
found'               t3 t4 …      the reference's token instead of x, and on from there
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams

HERE = Path(__file__).parent
TIE = 1e-3
MAX_EXCUSED_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt and its continuation by the reference; gaps[i] is the lead of token i over the next best."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    gaps: list[float]


@dataclass(frozen=True, slots=True)
class Reference:
    """A model's records. sha256: of the GGUF file they were made from."""

    sha256: str
    prompts: list[str]
    records: list[Record]
    long: Record


@dataclass(frozen=True, slots=True)
class Comparison:
    """found: each record's tokens, by free running. excused, wrong: (record, position) of differences."""

    found: list[list[int]]
    excused: list[tuple[int, int]]
    wrong: list[tuple[int, int]]
    num_tokens: int

    def __str__(self) -> str:
        share = len(self.excused) / self.num_tokens
        return f"{self.num_tokens} tokens, {len(self.wrong)} wrong, {len(self.excused)} excused ({share:.2%})"


def load(model: str) -> Reference:
    """The reference of a demo model."""
    read: Any = json.loads((HERE / "reference" / f"{model}.json").read_text(encoding="utf-8"))
    prompts = json.loads((HERE / "prompts" / f"{model}.json").read_text(encoding="utf-8"))
    return Reference(read["sha256"], prompts, [Record(**each) for each in read["prompts"]], Record(**read["long"]))


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: Sequence[int], **changes: Any) -> list[Any]:
    """The outputs of prompts in one batch, ended by nothing but their lengths."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, **changes) for n in num_tokens]
    return llm.generate(list(prompts), params)


def compare(llm: LLM, records: Sequence[Record], *, num_tokens: int | None = None, alone: bool = True) -> Comparison:
    """Run records one after the other or all in one batch, going on from the reference's token at each difference.

    Args:
        num_tokens: of each record; None for all.
    """
    lengths = [len(record.token_ids[:num_tokens]) for record in records]
    prompts = [record.prompt_token_ids for record in records]
    if alone:
        found = [tokens_of(greedy(llm, [p], [n])[0]) for p, n in zip(prompts, lengths, strict=True)]
    else:
        found = [tokens_of(output) for output in greedy(llm, prompts, lengths)]
    excused: list[tuple[int, int]] = []
    wrong: list[tuple[int, int]] = []
    for index, (record, tokens) in enumerate(zip(records, found, strict=True)):
        start, rest = 0, tokens
        while (position := _first_difference(record.token_ids[start : lengths[index]], rest)) is not None:
            start += position
            (excused if record.gaps[start] <= TIE else wrong).append((index, start))
            start += 1
            if start == lengths[index]:
                break
            forced = record.prompt_token_ids + record.token_ids[:start]
            rest = tokens_of(greedy(llm, [forced], [lengths[index] - start])[0])
    return Comparison(found, excused, wrong, sum(lengths))


def tokens_of(output: Any) -> list[int]:
    """The tokens of a request's first choice."""
    tokens: list[int] = output.outputs[0].token_ids
    return tokens


def _first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
