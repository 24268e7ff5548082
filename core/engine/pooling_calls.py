"""Calls of a pooling model: which texts go to the engine, and what their vectors become.

    embed, classify, encode     one text ──> one output
    score, classifier           (query, document) read as a pair ──> its only label
    score, embeddings           queries and documents read once each ──> one similarity for each pair

`LLM` and `AsyncEngine` make a PoolingCall, run its texts, and finish it; nothing here waits or knows an engine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.base.pooling import PoolingJob, PoolingParams
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    pooled_output,
    vector_of,
)
from octavo.core.engine.prompts import Prompt, PromptReader, ServedModel
from octavo.core.engine.wire import EngineRequest
from octavo.core.pool.pooler import Pooler

Result = TypeVar("Result")

NO_TOKENS = SamplingParams(max_tokens=0)
DEFAULTS = PoolingParams()


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text, or a pair of them.

    Attributes:
        text: the text, or its token ids.
        second: the second text of a pair.
        prompt: is put before the text.
        params: how its vector is made.
    """

    text: Prompt
    second: str | None = None
    prompt: str | None = None
    params: PoolingParams = DEFAULTS


@dataclass(frozen=True, slots=True)
class PoolingCall(Generic[Result]):
    """The texts of one call, and what is made of the finished requests, which come in the same order."""

    inputs: list[PoolingInput]
    finish: Callable[[Sequence[RequestOutput]], list[Result]]


class PoolingDoor:
    """Checks what is asked of one model. May be used from several threads.

    Args:
        model: what is served.
        reader: of its prompts.
    """

    def __init__(self, model: ServedModel, reader: PromptReader) -> None:
        self._model = model
        self._reader = reader

    # -- calls ------------------------------------------------------------------------------------------------

    def embed(
        self, prompts: Sequence[Prompt], params: PoolingParams, prompt_name: str | None
    ) -> PoolingCall[EmbeddingRequestOutput]:
        """One embedding for each prompt. Raises InvalidRequest."""
        pooler = self._pooler("embed")
        prompt = _named_prompt(pooler, prompt_name)
        if prompt_name is not None and not all(isinstance(text, str) for text in prompts):
            raise InvalidRequest(
                "prompt_name puts a text before texts; give texts, or put its token ids before yours",
                field="prompt_name",
            )
        inputs = [PoolingInput(text, prompt=prompt, params=params) for text in prompts]
        return PoolingCall(inputs, lambda outputs: [pooled_output(o, EmbeddingOutput(vector_of(o))) for o in outputs])

    def classify(self, prompts: Sequence[Prompt], params: PoolingParams) -> PoolingCall[ClassificationRequestOutput]:
        """Probabilities of the labels for each prompt. Raises InvalidRequest."""
        labels = self._pooler("classify").labels
        inputs = [PoolingInput(text, params=params) for text in prompts]
        return PoolingCall(
            inputs, lambda outputs: [pooled_output(o, ClassificationOutput(vector_of(o), labels)) for o in outputs]
        )

    def encode(
        self, prompts: Sequence[Prompt], params: PoolingParams
    ) -> PoolingCall[PoolingRequestOutput[PoolingOutput]]:
        """What the model's pooler makes of each prompt, whatever its task. Raises InvalidRequest."""
        prompt = self._pooler(None).default_prompt
        inputs = [PoolingInput(text, prompt=prompt, params=params) for text in prompts]
        return PoolingCall(inputs, lambda outputs: [pooled_output(o, PoolingOutput(vector_of(o))) for o in outputs])

    def score(
        self, queries: Sequence[str], documents: Sequence[str], params: PoolingParams
    ) -> PoolingCall[ScoringRequestOutput]:
        """A score for each pair: of the only query with each document, or of queries and documents one by one.

        Raises:
            InvalidRequest: numbers that don't go together, or a model that gives no scores.
        """
        for field, texts in (("queries", queries), ("documents", documents)):
            if not texts or not all(isinstance(text, str) for text in texts):
                raise InvalidRequest(f"{field} must be a text or a list of at least one text", field=field)
        if len(queries) not in (1, len(documents)):
            raise InvalidRequest(
                f"{len(queries)} queries for {len(documents)} documents; give one, or one for each", field="queries"
            )
        pooler = self._pooler(None)
        if pooler.task == "classify":
            return _cross_encoder_scores(pooler, queries, documents, params)
        return _similarities(pooler, queries, documents)

    # -- requests ---------------------------------------------------------------------------------------------

    def read(
        self, request_id: str, item: PoolingInput, *, priority: int = 0, cache_salt: str | None = None
    ) -> EngineRequest:
        """Check and tokenise one input.

        Raises:
            InvalidRequest: naming the field, the limit and the fix.
        """
        pooler = self._pooler(None)
        self._check_dimensions(pooler, item.params.dimensions)
        prompt, first_segment = self._encoded(pooler, item)
        request = self._reader.prepare(request_id, prompt, NO_TOKENS, priority=priority, cache_salt=cache_salt)
        normalize, activate = item.params.normalize, item.params.use_activation
        job = PoolingJob(
            needs_every_token=pooler.kind != "last",
            first_token=self._prompt_tokens(pooler, item, len(request.prompt_token_ids)),
            first_segment_tokens=first_segment if pooler.token_types > 1 else None,
            dimensions=item.params.dimensions,
            normalize=pooler.normalize if normalize is None else normalize,
            activate=activate is not False,
        )
        return replace(request, pooling=job)

    def _encoded(self, pooler: Pooler, item: PoolingInput) -> tuple[Prompt, int | None]:
        """The input as a prompt, and of a pair how many tokens are of its first text."""
        if not isinstance(item.text, str):
            return item.text, None
        text, second = (item.prompt or "") + item.text, item.second
        if pooler.lower_case:
            text, second = text.lower(), None if second is None else second.lower()
        return (text, None) if second is None else self._reader.pair_ids(text, second)

    def _prompt_tokens(self, pooler: Pooler, item: PoolingInput, num_tokens: int) -> int:
        """How many tokens of the prompt a mean leaves out: those of the prompt alone, but for what ends a text."""
        if pooler.include_prompt or not item.prompt or not isinstance(item.text, str):
            return 0
        prompt_ids = self._reader.text_ids(item.prompt.lower() if pooler.lower_case else item.prompt)
        count = len(prompt_ids) - sum(self._reader.is_special(token_id) for token_id in prompt_ids[-1:])
        if count >= num_tokens:
            raise InvalidRequest(
                "the text is empty but for its prompt, which this model leaves out; give some text", field="prompt"
            )
        return count

    def _check_dimensions(self, pooler: Pooler, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if pooler.task != "embed":
            raise InvalidRequest("dimensions is of embeddings; leave it out for a classifier", field="dimensions")
        if dimensions > pooler.out_width:
            raise InvalidRequest(
                f"dimensions is {dimensions}; the model's embeddings have {pooler.out_width} elements: ask for fewer",
                field="dimensions",
            )
        if pooler.dimensions and dimensions not in (*pooler.dimensions, pooler.out_width):
            known = ", ".join(map(str, pooler.dimensions))
            raise InvalidRequest(
                f"dimensions is {dimensions}; the model was trained for {known}: ask for one of them",
                field="dimensions",
            )

    def _pooler(self, task: str | None) -> Pooler:
        """The model's pooler, which must be of a task (None: of any)."""
        pooler = self._model.pooler
        if pooler is None:
            raise InvalidRequest(
                "this model generates text and gives no vectors; use an embedding model or a classifier, or say by "
                "pooling how its rows become a vector when it is loaded",
                field="model",
            )
        if task is not None and pooler.task != task:
            gives = "classes: use classify or score" if pooler.task == "classify" else "embeddings: use embed or score"
            raise InvalidRequest(f"this model gives {gives}", field="model")
        return pooler


def _cross_encoder_scores(
    pooler: Pooler, queries: Sequence[str], documents: Sequence[str], params: PoolingParams
) -> PoolingCall[ScoringRequestOutput]:
    if len(pooler.labels) != 1:
        raise InvalidRequest(
            f"this model has {len(pooler.labels)} labels; a score needs a classifier with one: use classify",
            field="model",
        )
    several = queries if len(queries) > 1 else list(queries) * len(documents)
    inputs = [PoolingInput(query, second, params=params) for query, second in zip(several, documents, strict=True)]
    return PoolingCall(inputs, lambda outputs: [pooled_output(o, ScoringOutput(vector_of(o)[0])) for o in outputs])


def _similarities(
    pooler: Pooler, queries: Sequence[str], documents: Sequence[str]
) -> PoolingCall[ScoringRequestOutput]:
    """Each text once, with the prompts that the model has for queries and documents."""
    if pooler.similarity is None:
        raise InvalidRequest(
            "this model compares embeddings in a way that is not implemented; use embed and compare them yourself",
            field="model",
        )
    params = PoolingParams(normalize=True if pooler.similarity == "cosine" else None)
    of_query, of_document = (pooler.prompts.get(name, pooler.default_prompt) for name in ("query", "document"))
    inputs = [PoolingInput(text, prompt=of_query, params=params) for text in queries]
    inputs += [PoolingInput(text, prompt=of_document, params=params) for text in documents]

    def finish(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        vectors = [vector_of(output) for output in outputs]
        scored = []
        for place in range(len(queries), len(outputs)):
            query = place - len(queries) if len(queries) > 1 else 0
            score = sum(map(operator.mul, vectors[query], vectors[place]))
            output = pooled_output(outputs[place], ScoringOutput(score))
            scored.append(replace(output, prompt_token_ids=outputs[query].prompt_token_ids + output.prompt_token_ids))
        return scored

    return PoolingCall(inputs, finish)


def _named_prompt(pooler: Pooler, name: str | None) -> str | None:
    if name is None:
        return pooler.default_prompt
    prompts: Mapping[str, str] = pooler.prompts
    if name not in prompts:
        known = f"it has {', '.join(prompts)}" if prompts else "it has none"
        raise InvalidRequest(f"prompt_name is one that the model does not know; {known}", field="prompt_name")
    return prompts[name]
