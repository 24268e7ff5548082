"""What callers of a pooling model get back. Shaped like vLLM's, so that a script changes one import.

embed     EmbeddingRequestOutput.outputs.embedding          classify   ClassificationRequestOutput.outputs.probs
score     ScoringRequestOutput.outputs.score                encode     PoolingRequestOutput.outputs.data
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import Generic, TypeVar

from octavo.core.base.errors import RequestFailed
from octavo.core.engine.outputs import RequestOutput

Output = TypeVar("Output")


@dataclass(slots=True)
class PoolingOutput:
    """What the pooler made, whatever the task."""

    data: list[float]


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Elements of the vector."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """One probability (or logit) for each label, in the order of the config's id2label.

    Attributes:
        labels: their names.
    """

    probs: list[float]
    labels: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together: the larger, the better."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A pooling request's reply.

    Attributes:
        outputs: what was asked for.
        prompt_token_ids: of the text; of both texts, for a score.
        num_cached_tokens: of them, found in the prefix cache.
        finished: always True.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


def vector_of(output: RequestOutput) -> list[float]:
    """The vector of a finished pooling request.

    Raises:
        RequestFailed: the request failed by itself, or was ended before it had one.
    """
    if output.pooled is None:
        raise RequestFailed(output.outputs[0].error or "the request ended before its text was computed")
    values = array("f", output.pooled)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def pooled_output(output: RequestOutput, made: Output) -> PoolingRequestOutput[Output]:
    """What a caller gets for one text."""
    return PoolingRequestOutput(output.request_id, made, output.prompt_token_ids, output.num_cached_tokens)
