"""The request bodies of OpenAI's completions and chat completions, with the extensions vLLM's users know.

Pydantic checks shapes here, at the edge, strictly: "1" is no number. Ranges are checked by SamplingParams. A field
that would change the answer and that this version can't honour is refused; one that nobody knows is ignored and named
in a response header. Lists are checked to their first fault, so that a huge wrong one costs no more than a right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import MAX_N, SamplingParams
from octavo.core.engine.prompts import Prompt
from octavo.core.serve.extras import Extras
from octavo.core.serve.form import form_of

MAX_PROMPTS = 2048
"""In one request, as in OpenAI's API."""

MAX_CHOICES = 4096
"""Of all prompts of a request together."""

MAX_TEXTS = 1024
MAX_TEXT_CHARS = 4096
"""Of a list of words that a reply must not or must have."""

MAX_BIASES = 4096
MAX_TOKEN_IDS = 1 << 20
"""More than any vocabulary has."""

NOTHING: tuple[Any, ...] = (None, False, [], {}, "")
"""Values of any unsupported field that ask for nothing."""

SAMPLING_FIELDS = (
    "n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "logit_bias",
    "bad_words", "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
"""Fields that go to SamplingParams as they are, when given."""


def _as_prompts(value: Any) -> list[Prompt]:
    """The prompts of a completion request as a list. What is in a list of token ids, the engine's door checks."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("prompt", "give a text, a list of token ids, or a list of texts or of such lists")
    several = all(isinstance(each, str) for each in value) or all(isinstance(each, list) for each in value)
    if several and len(value) > MAX_PROMPTS:
        raise PydanticCustomError("prompt", f"give at most {MAX_PROMPTS} prompts at once")
    return value if several else [value]


def _as_bias(value: Any) -> dict[int, float] | None:
    """logit_bias, whose keys are token ids written as text."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise PydanticCustomError("logit_bias", "give an object of token ids and numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("logit_bias", f"give at most {MAX_BIASES} token ids")
    bias = {}
    for key, added in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10) or type(added) not in (int, float):
            raise PydanticCustomError("logit_bias", "each key must be a token id and each value a number")
        bias[int(key)] = float(added)
    return bias


def _as_texts(value: Any) -> list[str] | None:
    if value is not None and (not isinstance(value, list) or any(type(each) is not str for each in value)):
        raise PydanticCustomError("texts", "give a list of texts")
    if len(value or ()) > MAX_TEXTS or any(len(each) > MAX_TEXT_CHARS for each in value or ()):
        raise PydanticCustomError("texts", f"give at most {MAX_TEXTS} texts of at most {MAX_TEXT_CHARS} characters")
    return value


def _as_stop(value: Any) -> list[str] | None:
    return [value] if isinstance(value, str) else _as_texts(value)


def _as_token_ids(value: Any) -> list[int] | None:
    if value is not None and (not isinstance(value, list) or any(type(each) is not int for each in value)):
        raise PydanticCustomError("token_ids", "give a list of token ids")
    if len(value or ()) > MAX_TOKEN_IDS:
        raise PydanticCustomError("token_ids", f"give at most {MAX_TOKEN_IDS} token ids")
    return value


Prompts = Annotated[Any, PlainValidator(_as_prompts, str | list[str] | list[int] | list[list[int]])]
Bias = Annotated[Any, PlainValidator(_as_bias, dict[str, float] | None)]
Texts = Annotated[Any, PlainValidator(_as_texts, list[str] | None)]
Stop = Annotated[Any, PlainValidator(_as_stop, str | list[str] | None)]
TokenIds = Annotated[Any, PlainValidator(_as_token_ids, list[int] | None)]


class StreamOptions(BaseModel):
    """What a stream tells besides its pieces.

    Attributes:
        include_usage: one last chunk holds the usage.
        continuous_usage_stats: with it, each chunk holds the usage so far.
        include_obfuscation: taken; nothing is padded.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CheckedBody(BaseModel):
    """A body some of whose fields may be unknown."""

    model_config = ConfigDict(strict=True, extra="allow")

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Known fields that this version can't honour, each with the values, besides NOTHING, that ask for no more than
    what happens anyway."""

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequest for a field that asks for something this version can't do."""
        for name, harmless in self.UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            if value not in NOTHING and value not in harmless:
                raise InvalidRequest(f"{name} is not supported by this version; leave it out", field=name)

    def ignored_fields(self) -> list[str]:
        """Fields in the body that nobody reads."""
        return sorted(set(self.model_extra or {}) - set(self.UNSUPPORTED))


class CheckedRequest(CheckedBody):
    """What all endpoints take that run a model."""

    model: str
    priority: int = 0


class GenerationRequest(CheckedRequest):
    """What both endpoints that generate take."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    logit_bias: Bias = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: Texts = None
    allowed_token_ids: TokenIds = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Texts = None
    guided_grammar: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    return_token_ids: bool | None = None

    def refuse_unsupported(self) -> None:
        """See CheckedBody."""
        super().refuse_unsupported()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only for a stream; set stream to true", field="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs can't be streamed; set stream to false", field="prompt_logprobs")

    @property
    def extras(self) -> Extras:
        """What the reply tells besides its choices' text."""
        options = self.stream_options or StreamOptions()
        return Extras(
            usage=bool(options.include_usage),
            running_usage=bool(options.include_usage and options.continuous_usage_stats),
            token_ids=bool(self.return_token_ids),
            prompt_logprobs=self.prompt_logprobs,
        )

    def ignored_fields(self) -> list[str]:
        """Fields in the body that nobody reads."""
        options = self.stream_options.model_extra if self.stream_options is not None else None
        return sorted([*super().ignored_fields(), *(f"stream_options.{name}" for name in options or {})])

    @property
    def form_field(self) -> str:
        """The field that sets the form of the reply, where one does."""
        guided = (name for name in type(self).model_fields if name.startswith("guided_"))
        if (given := next((name for name in guided if getattr(self, name) is not None), None)) is not None:
            return given
        return "structured_outputs" if self.structured_outputs else "response_format"

    def sampling(self, **more: Any) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        form = form_of(
            self.response_format,
            self.structured_outputs,
            {
                "json": self.guided_json,
                "regex": self.guided_regex,
                "choice": self.guided_choice,
                "grammar": self.guided_grammar,
            },
        )
        return SamplingParams(**{"prompt_logprobs": self.prompt_logprobs, **given, **more}, structured=form)

    def truncated(self, token_ids: list[int], max_model_len: int, max_tokens: int | None) -> list[int]:
        """The end of a prompt, as `truncate_prompt_tokens` has it; -1: what leaves room for the reply."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if limit > max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens is above max_model_len {max_model_len}; lower it",
                field="truncate_prompt_tokens",
            )
        if limit == -1:
            limit = max(max_model_len - (1 if max_tokens is None else max_tokens), 1)
        if limit == 0:
            raise InvalidRequest("truncate_prompt_tokens is 0, which leaves no prompt", field="truncate_prompt_tokens")
        return token_ids[-limit:]


REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (),
    "length_penalty": (1.0,),
    "prompt_embeds": (),
    "logits_processors": (),
    "grammar": (),
    "repeat_penalty": (1.0,),
    "typical_p": (1.0,),
    "mirostat": (0,),
    "truncation_side": ("left",),
    "return_tokens_as_token_ids": (),
    "kv_transfer_params": (),
    "mm_processor_kwargs": (),
    "thinking_token_budget": (),
    "vllm_xargs": (),
}
