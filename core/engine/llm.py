"""`LLM`: an engine in the caller's own process and thread.

with LLM("smollm2") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from octavo.core.backend.opset import OpChoice
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import EngineDead, InvalidRequest
from octavo.core.base.metrics import SchedulerStats
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.engine import Engine
from octavo.core.engine.loading import open_model
from octavo.core.engine.output_processor import OutputProcessor
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.prompts import Message, Prompt, PromptReader, ServedModel
from octavo.core.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Conversation = Sequence[Message]


class LLM:
    """A model, loaded and ready to generate. Not thread-safe; several may live in one process.

    Args:
        model: a directory, a .gguf file, a Hugging Face id, or a demo name.
        options: the other fields of `EngineConfig`, by name.

    Raises:
        UserError: an option, the model or the backend is at fault; nothing is left behind.
    """

    def __init__(self, model: str, **options: Any) -> None:
        config = EngineConfig(model=model, **options)
        config.validate()
        with open_model(config) as opened:
            self._tokenizer = opened.tokenizer
            self._engine = Engine.from_checkpoint(config, opened.checkpoint)
            self._model = ServedModel(
                vocab_size=self._engine.vocab_size,
                max_model_len=self._engine.sizes.max_model_len,
                eos_token_ids=opened.eos_token_ids,
                tokenizer=opened.tokenizer,
            )
        self._reader = PromptReader(self._model)
        self._processor = OutputProcessor(self._tokenizer)
        self._ids = itertools.count()
        self._closed = False

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None when it serves token ids only."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its reply."""
        return self._model.max_model_len

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Continue prompts; all of them share the engine's batches.

        Args:
            prompts: one or several, each a string or a list of token ids.
            params: one for all, one for each, or None for the defaults.

        Returns:
            One output per prompt, in the order given. A request that failed by itself has finish_reason ERROR.

        Raises:
            InvalidRequest: a prompt or its parameters can't be served; none of the prompts runs.
        """
        several = _as_prompts(prompts)
        request_ids = self._submit_all(several, _as_params(params, len(several)))
        try:
            while self._engine.has_work():
                self._step()
        except BaseException:
            self._drop(request_ids)
            raise
        return [self._processor.result(request_id) for request_id in request_ids]

    def generate_stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt, yielding what each step brought. Closing the iterator ends the request.

        Raises:
            InvalidRequest: before anything is yielded.
        """
        (request_id,) = self._submit_all([prompt], [params or SamplingParams()])
        return self._stream(request_id)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        **template_arguments: Any,
    ) -> list[RequestOutput]:
        """Reply to one conversation, or to several.

        Args:
            messages: OpenAI's messages, oldest first; or a list of such lists.
            params: as for `generate`.
            template_arguments: of `ChatTemplate.render` (add_generation_prompt, tools, …).

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """
        several = _as_conversations(messages)
        return self.generate([self._reader.read_chat(each, **template_arguments) for each in several], params)

    def chat_stream(
        self, messages: Conversation, params: SamplingParams | None = None, **template_arguments: Any
    ) -> Iterator[RequestOutput]:
        """Reply to one conversation, yielding what each step brought."""
        return self.generate_stream(self._reader.read_chat(messages, **template_arguments), params)

    def stats(self) -> SchedulerStats:
        """Gauges and totals of the engine at this moment."""
        return self._engine.stats()

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op, with reasons and the calls of fallbacks."""
        return self._engine.op_choices()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the model, the KV cache and the device. Idempotent."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _submit_all(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[str]:
        """Submit all or, when one is refused, none."""
        if self._closed:
            raise EngineDead("this LLM was closed; make a new one")
        requests = [
            self._reader.read(str(next(self._ids)), prompt, each) for prompt, each in zip(prompts, params, strict=True)
        ]
        added: list[str] = []
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                self._engine.add_request(request)
                self._processor.add(request, prompt if isinstance(prompt, str) else None)
                added.append(request.request_id)
        except BaseException:
            self._drop(added)
            raise
        return added

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        try:
            finished = False
            while not finished:
                for piece in self._step():
                    if piece.request_id == request_id:
                        finished = piece.finished
                        yield piece
        finally:
            self._drop([request_id])

    def _step(self) -> list[RequestOutput]:
        """One engine step; ends in the engine what ended by a stop string."""
        processed = self._processor.process(self._engine.step())
        for stop in processed.stops:
            self._engine.abort([(stop.request_id, stop.index)], FinishReason.STOP, stop.stop_string)
        return processed.pieces

    def _drop(self, request_ids: Sequence[str]) -> None:
        """End requests that nobody waits for any more."""
        for request_id in request_ids:
            self._engine.abort(self._processor.open_choices(request_id))
            self._processor.discard(request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """A list of conversations, whether one or several were given."""
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _as_params(params: Params, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequest(f"{len(params)} params for {count} prompts; give one, or one for each", field="params")
    return list(params)
