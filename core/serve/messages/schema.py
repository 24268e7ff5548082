"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.serve.form import form_of
from octavo.core.serve.schema import CheckedRequest, Texts

Json = dict[str, Any]

THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""The type of `thinking` -> whether the model is told to think. How long it does is its own affair."""


class CountTokensRequest(CheckedRequest):
    """POST /v1/messages/count_tokens."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        "mcp_servers": (),
        "speed": ("standard",),
    }

    messages: Annotated[list[Json], FailFast()]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    cache_control: Json | None = None
    chat_template_kwargs: Json | None = None

    @property
    def parallel_tool_calls(self) -> bool:
        """Whether a reply may hold more calls than one."""
        return not (self.tool_choice or {}).get("disable_parallel_tool_use")

    def template_variables(self) -> Json:
        """What the chat template is told, under the names that templates ask for. Raises InvalidRequest."""
        told: Json = {}
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if not isinstance(kind, str) or kind not in THINKING:
                raise InvalidRequest(f"thinking.type must be one of {', '.join(THINKING)}", field="thinking.type")
            told = {"enable_thinking": THINKING[kind], "thinking": THINKING[kind]}
        if (effort := (self.output_config or {}).get("effort")) is not None:
            told["reasoning_effort"] = effort
        return told | (self.chat_template_kwargs or {})

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        return SamplingParams()


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Texts = None
    metadata: Json | None = None
    stream: bool | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)

    @property
    def shows_thinking(self) -> bool:
        """Whether a reply holds what the model said to itself."""
        return (self.thinking or {}).get("display") != "omitted"

    def sampling_params(self) -> SamplingParams:
        """See CountTokensRequest."""
        names = ("temperature", "top_p", "top_k")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        form = (self.output_config or {}).get("format")
        if form is not None and (not isinstance(form, dict) or form.get("type") != "json_schema"):
            raise InvalidRequest(
                "output_config.format must be {'type': 'json_schema', 'schema': …}", field="output_config.format"
            )
        wanted = None if form is None else {"json": form.get("schema")}
        return SamplingParams(
            **given,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            structured=form_of(None, wanted, {}),
        )
