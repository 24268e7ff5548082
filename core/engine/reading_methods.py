"""What `AsyncEngine` reads without running it: texts, conversations, and whole requests."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from octavo.core.base.params import SamplingParams
from octavo.core.base.structured import StructuredOutput
from octavo.core.engine.prompts import Message, Prompt, PromptReader, RequestOptions
from octavo.core.engine.wire import EngineRequest


class AsyncReadingMethods(abc.ABC):
    """Reads in a thread, so that the event loop goes on."""

    @property
    @abc.abstractmethod
    def _reader(self) -> PromptReader:
        """Of the started engine. Raises EngineDead."""

    @abc.abstractmethod
    async def _reading(
        self, sampling_params: SamplingParams | None, options: RequestOptions
    ) -> Callable[[str, Prompt], EngineRequest]:
        """How prompts of a generating call are read."""

    async def read_chat(self, messages_: Sequence[Message], **template_arguments: Any) -> list[int]:
        """Token ids of a conversation.

        Raises:
            InvalidRequest: the model has no chat template, or it refuses the conversation.
        """
        return await asyncio.to_thread(self._reader.read_chat, messages_, **template_arguments)

    async def read_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: also what the tokenizer puts around a text.

        Raises:
            InvalidRequest: the model has no tokenizer, or the text is far too long.
        """
        return await asyncio.to_thread(self._reader.text_ids, text, add_special_tokens=add_special_tokens)

    def check_form(self, structured: StructuredOutput) -> None:
        """Wait until a reply's form is compiled; blocks, so it is for a thread.

        Raises:
            InvalidRequest: it can't be had.
        """
        self._reader.check_form(structured)

    async def read_prompts(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[EngineRequest]:
        """The requests that `generate_many` would make of its arguments, checked and not run; they have no ids yet.

        Raises:
            InvalidRequest: as for `generate_many`.
        """
        read = await self._reading(sampling_params, options)
        return await asyncio.to_thread(lambda: [read("", prompt) for prompt in prompts])
