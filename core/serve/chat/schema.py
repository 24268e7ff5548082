"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field, PlainValidator
from pydantic_core import PydanticCustomError

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.serve.schema import REFUSED, GenerationRequest

Json = dict[str, Any]

MAX_MESSAGES = 100_000


def _as_objects(value: Any) -> list[Json] | None:
    if value is not None and (not isinstance(value, list) or any(not isinstance(each, dict) for each in value)):
        raise PydanticCustomError("objects", "give a list of objects")
    return value


Objects = Annotated[Any, PlainValidator(_as_objects, list[Json] | None)]

_OLDER = {"functions": "tools", "function_call": "tool_choice"}


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "functions": (),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "verbosity": ("medium",),
        "add_special_tokens": (),
    }

    messages: Annotated[list[Json], FailFast(), Field(max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Objects = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    documents: Objects = None

    store: bool | None = None
    metadata: Json | None = None
    prediction: Json | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    """From `store` on: taken, and without effect. Nothing is stored; a prefix is found in the cache by itself."""

    def refuse_unsupported(self) -> None:
        """See CheckedRequest."""
        for name, newer in _OLDER.items():
            if (self.model_extra or {}).get(name) not in (None, [], "none", "auto"):
                raise InvalidRequest(f"{name} was replaced in OpenAI's API; give {newer} instead", field=name)
        super().refuse_unsupported()

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)

    @property
    def begins_turn(self) -> bool:
        """Whether the prompt ends with the words that begin the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @property
    def allows_several_calls(self) -> bool:
        """Whether a reply may hold more calls than one."""
        return self.parallel_tool_calls is not False

    @property
    def shows_reasoning(self) -> bool:
        """Whether a reply holds what the model said to itself."""
        return self.include_reasoning is not False

    def template_variables(self) -> Json:
        """What the chat template is told, under the names that templates ask for."""
        told: Json = {}
        if self.documents:
            told["documents"] = self.documents
        if self.reasoning_effort is not None:
            told["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":  # as templates that know no effort put it
            told["enable_thinking"] = False
        return told | (self.chat_template_kwargs or {})

    def echoed(self) -> str:
        """The words that come before each choice's own: with `echo`, those of an assistant's message at the end."""
        last = self.messages[-1] if self.echo and self.messages else {}
        content = last.get("content") if last.get("role") == "assistant" else None
        return content if isinstance(content, str) else "".join(part["text"] for part in content or ())
