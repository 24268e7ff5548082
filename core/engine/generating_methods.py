"""What `AsyncEngine` generates: pieces as they come, or whole replies, for one prompt, several, or a conversation."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, Unpack

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.lora import LoRARequest
from octavo.core.base.params import SamplingParams
from octavo.core.engine.adapter_calls import AdapterDesk
from octavo.core.engine.call_stream import CallStream
from octavo.core.engine.front import Front
from octavo.core.engine.observer import RequestReport
from octavo.core.engine.outputs import RequestOutput
from octavo.core.engine.prompts import Message, Prompt, RequestOptions
from octavo.core.engine.reading_methods import AsyncReadingMethods
from octavo.core.engine.wire import EngineRequest

Item = TypeVar("Item")


class AsyncGeneratingMethods(AsyncReadingMethods):
    """Generating calls over an engine's streams."""

    @property
    @abc.abstractmethod
    def _started(self) -> Front:
        """What the engine has once a model is loaded. Raises EngineDead before the start and after the end."""

    @property
    @abc.abstractmethod
    def _desk(self) -> AdapterDesk:
        """Calls about adapters. Raises EngineDead."""

    @abc.abstractmethod
    async def _submit(
        self,
        prompts: Sequence[Item],
        read: Callable[[str, Item], EngineRequest],
        *,
        every_piece: bool,
        report: RequestReport | None,
    ) -> CallStream:
        """Check requests, open their stream and send them: all, or when one is refused none."""

    @abc.abstractmethod
    def _drop(self, stream: CallStream) -> None:
        """Forget a stream; end in the engine what is still open of its requests."""

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt, yielding what each step brought. Closing the iterator ends the request.

        Args:
            prompt: a string or a list of token ids.
            sampling_params: None takes the defaults; logits_processors can't cross processes.
            options: see RequestOptions.

        Raises:
            InvalidRequest: before anything is yielded; the engine goes on.
            EngineDead: the engine ended.
        """
        async with aclosing(self.generate_many([prompt], sampling_params, **options)) as pieces:
            async for _, piece in pieces:
                yield piece

    async def generate_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Continue several prompts at once, yielding (index of the prompt, piece) as they come.

        Arguments and errors are those of `generate`; when one prompt is refused, none goes on.
        """
        read = await self._reading(sampling_params, options)
        stream = await self._submit(prompts, read, every_piece=True, report=options.get("report"))
        try:
            while (item := await stream.next()) is not None:
                yield item
        finally:
            self._drop(stream)

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Continue one prompt to its end; arguments and errors are those of `generate`."""
        (output,) = await self.complete_many([prompt], sampling_params, **options)
        return output

    async def complete_many(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Continue several prompts to their ends, in the order given; as `generate_many` otherwise."""
        read = await self._reading(sampling_params, options)
        stream = await self._submit(prompts, read, every_piece=False, report=options.get("report"))
        return await self._complete(stream)

    async def chat(
        self,
        messages_: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        **template_arguments: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Reply to one conversation, as `generate` does; template_arguments are those of `ChatTemplate.render`."""
        token_ids = await self.read_chat(messages_, **template_arguments)
        options: RequestOptions = {"priority": priority, "cache_salt": cache_salt, "lora_request": lora_request}
        async with aclosing(self.generate(token_ids, sampling_params, **options)) as pieces:
            async for piece in pieces:
                yield piece

    async def _reading(
        self, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Callable[[str, Prompt], EngineRequest]:
        """How prompts of a generating call are read; their adapter is there afterwards."""
        params = sampling_params or SamplingParams()
        if params.logits_processors:
            raise InvalidRequest(
                "logits_processors run in the engine's own process only; use LLM for them", field="logits_processors"
            )
        reader, adapter = self._started.reader, options.get("lora_request")
        salt, priority = options.get("cache_salt"), options.get("priority", 0)
        if adapter is not None:
            await self._desk.ensure(adapter)
        name = None if adapter is None else adapter.lora_name

        def read(request_id: str, prompt: Prompt) -> EngineRequest:
            request = reader.read(request_id, prompt, params, priority=priority, cache_salt=salt)
            return request if name is None else dataclasses.replace(request, adapter=name)

        return read

    async def _complete(self, stream: CallStream) -> list[RequestOutput]:
        """Wait for the ends of a call's requests."""
        try:
            while await stream.next() is not None:
                pass
            return [self._started.processor.result(request_id) for request_id in stream.places]
        finally:
            self._drop(stream)
