"""The bodies of POST /tokenize and /detokenize, as vLLM's users know them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import FailFast, Field

from octavo.core.base.errors import InvalidRequest
from octavo.core.serve.chat.schema import MAX_MESSAGES, Objects
from octavo.core.serve.schema import CheckedBody, TokenIds

Json = dict[str, Any]


class TokenizeRequest(CheckedBody):
    """POST /tokenize: a text, or a conversation."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"mm_processor_kwargs": (), "media_io_kwargs": ()}

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    messages: Annotated[list[Json] | None, FailFast(), Field(max_length=MAX_MESSAGES)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    tools: Objects = None

    def check(self) -> None:
        """Raise InvalidRequest unless there is one thing to tokenise."""
        self.refuse_unsupported()
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages", field="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest(
                "a conversation's special tokens are those that its template writes; leave add_special_tokens out",
                field="add_special_tokens",
            )

    @property
    def begins_turn(self) -> bool:
        """Whether a conversation's tokens end with those that begin the assistant's turn."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class DetokenizeRequest(CheckedBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
