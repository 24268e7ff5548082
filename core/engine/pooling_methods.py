"""`LLM`'s and `AsyncEngine`'s methods of models that give vectors: the same calls, run here or awaited there.

    vectors = llm.embed(["one text", "another"])            vectors = await engine.embed(["one text", "another"])

Arguments, results and errors are those of PoolingMethods in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

from octavo.core.base.pooling import PoolingParams
from octavo.core.engine.observer import RequestReport
from octavo.core.engine.pooling_calls import PoolingCall, PoolingDoor
from octavo.core.engine.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from octavo.core.engine.prompts import Prompt, as_prompts

Result = TypeVar("Result")
Texts = str | Sequence[str]


class PoolingMethods(ABC):
    """What `LLM` adds for embedding models and classifiers."""

    @property
    @abstractmethod
    def _pooling(self) -> PoolingDoor:
        """Of the model."""

    @abstractmethod
    def _run_pooling(self, call: PoolingCall[Result]) -> list[Result]:
        """Run a call's texts and finish it."""

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text.

        Args:
            prompts: one or several, each a string or a list of token ids.
            dimensions: keep this many elements, then normalise; None keeps all.
            normalize: give the vectors length 1; None does what the checkpoint says.
            prompt_name: which of the checkpoint's prompts to put before texts; None takes its default, if it has one.

        Raises:
            InvalidRequest: a text or an argument can't be served, or the model gives no embeddings; nothing runs.
            RequestFailed: a text's rows are NaN or infinite.
            EngineDead: the engine was closed, or a step failed.
        """
        params = PoolingParams(dimensions=dimensions, normalize=normalize)
        return self._run_pooling(self._pooling.embed(as_prompts(prompts), params, prompt_name))

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_activation: bool | None = None
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each text; with use_activation=False the logits. Raises as `embed`."""
        params = PoolingParams(use_activation=use_activation)
        return self._run_pooling(self._pooling.classify(as_prompts(prompts), params))

    def score(
        self, queries: Texts, documents: Texts, *, use_activation: bool | None = None
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: by a cross-encoder, or by the similarity of their embeddings.

        Args:
            queries: one for all documents, or one for each.
            documents: one or several.
            use_activation: False gives a cross-encoder's logit; None and True what its activation makes of it.

        Raises:
            as `embed`.
        """
        params = PoolingParams(use_activation=use_activation)
        return self._run_pooling(self._pooling.score(_as_texts(queries), _as_texts(documents), params))

    def encode(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model's pooler makes of each text: an embedding or a classifier's numbers. Raises as `embed`."""
        return self._run_pooling(self._pooling.encode(as_prompts(prompts), pooling_params or PoolingParams()))


class AsyncPoolingMethods(ABC):
    """What `AsyncEngine` adds for them: see PoolingMethods for arguments, results and errors. A report is filled in."""

    @property
    @abstractmethod
    def _pooling(self) -> PoolingDoor:
        """Of the model. Raises EngineDead before the start and after the end."""

    @abstractmethod
    async def _run_pooling(
        self, call: PoolingCall[Result], priority: int, report: RequestReport | None
    ) -> list[Result]:
        """Run a call's texts and finish it."""

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        priority: int = 0,
        report: RequestReport | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text."""
        params = PoolingParams(dimensions=dimensions, normalize=normalize)
        return await self._run_pooling(self._pooling.embed(as_prompts(prompts), params, prompt_name), priority, report)

    async def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        priority: int = 0,
        report: RequestReport | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each text."""
        params = PoolingParams(use_activation=use_activation)
        return await self._run_pooling(self._pooling.classify(as_prompts(prompts), params), priority, report)

    async def score(
        self,
        queries: Texts,
        documents: Texts,
        *,
        use_activation: bool | None = None,
        priority: int = 0,
        report: RequestReport | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together."""
        params = PoolingParams(use_activation=use_activation)
        call = self._pooling.score(_as_texts(queries), _as_texts(documents), params)
        return await self._run_pooling(call, priority, report)

    async def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        *,
        priority: int = 0,
        report: RequestReport | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model's pooler makes of each text."""
        call = self._pooling.encode(as_prompts(prompts), pooling_params or PoolingParams())
        return await self._run_pooling(call, priority, report)


def _as_texts(texts: Texts) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts
