"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator
from pydantic_core import PydanticCustomError

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams
from octavo.core.serve.form import form_of
from octavo.core.serve.schema import CheckedRequest, Stop

Json = dict[str, Any]

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512
"""As in OpenAI's API."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = frozenset({LOGPROBS, "reasoning.encrypted_content"})
"""What `include` may name. Reasoning is given in plain words and read back so: nothing of it need be encrypted."""

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "stop", "min_tokens", "ignore_eos",
)  # fmt: skip
"""Fields that go to SamplingParams as they are, when given."""


def _as_input(value: Any) -> str | list[Json]:
    """The input; what is in an item, input.py checks."""
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, dict) for item in value)):
        return value
    raise PydanticCustomError("input", "give a text or a list of items, which are objects")


Input = Annotated[Any, PlainValidator(_as_input, str | list[Json])]


class ResponsesRequest(CheckedRequest):
    """POST /v1/responses."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "conversation": (),
        "background": (),
        "prompt": (),
        "context_management": (),
        "max_tool_calls": (),
        "moderation": (),
        "access_programs": (),
        "image": (),
        "n": (1,),
    }

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    reasoning: Json | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    chat_template_kwargs: Json | None = None

    @property
    def allows_several_calls(self) -> bool:
        """Whether a reply may hold more calls than one."""
        return self.parallel_tool_calls is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether text comes with its tokens' logprobs."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def check(self) -> None:
        """Raise InvalidRequest for what asks for something this server can't do."""
        self.refuse_unsupported()
        if self.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id can't be followed, for nothing is kept; send the whole conversation as input",
                field="previous_response_id",
            )
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise InvalidRequest(f"include may name {' and '.join(sorted(INCLUDABLE))}", field="include")
        if (self.text or {}).get("verbosity") not in (None, "medium"):
            raise InvalidRequest("text.verbosity is not supported; leave it out", field="text.verbosity")
        metadata = self.metadata or {}
        if len(metadata) > MAX_METADATA or any(
            len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS
            for key, value in metadata.items()
        ):
            raise InvalidRequest(
                f"metadata may have {MAX_METADATA} pairs, with keys of {MAX_METADATA_KEY_CHARS} and values of "
                f"{MAX_METADATA_VALUE_CHARS} characters at most",
                field="metadata",
            )

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        form = form_of(_response_format((self.text or {}).get("format")), None, {})
        return SamplingParams(
            **given,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.wants_logprobs else None,
            structured=form,
        )

    def template_variables(self) -> Json:
        """What the chat template is told, under the names that templates ask for. Raises InvalidRequest."""
        effort = (self.reasoning or {}).get("effort")
        if effort is not None and effort not in EFFORTS:
            raise InvalidRequest(f"reasoning.effort must be one of {', '.join(EFFORTS)}", field="reasoning.effort")
        told: Json = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            told |= {"enable_thinking": False, "thinking": False}
        return told | (self.chat_template_kwargs or {})

    def echo(self) -> Json:
        """What a response says of its request. Nothing is stored, whatever was asked for."""
        text = self.text or {}
        reasoning = self.reasoning or {}
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.allows_several_calls,
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "truncation": self.truncation or "disabled",
            "user": self.user,
        }


def _response_format(form: Any) -> Json | None:
    """text.format in the words of chat completions, where a schema lies one level deeper."""
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequest(
            "text.format must be an object whose type is text, json_object or json_schema", field="text.format"
        )
    if form["type"] != "json_schema":
        return {"type": form["type"]}
    return {"type": "json_schema", "json_schema": {name: each for name, each in form.items() if name != "type"}}
