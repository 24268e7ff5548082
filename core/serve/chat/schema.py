"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.serve.schema import REFUSED, GenerationRequest


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **REFUSED,
        "tools": (),
        "tool_choice": ("none", "auto"),
        "functions": (),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "chat_template": (),
        "continue_final_message": (),
        "documents": (),
        "echo": (),
    }

    messages: Annotated[list[dict[str, Any]], FailFast()]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self.sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
