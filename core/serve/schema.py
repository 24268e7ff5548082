"""The request bodies of OpenAI's completions and chat completions, with the extensions vLLM's users know.

Pydantic checks shapes here, at the edge; ranges are checked by SamplingParams. A field that would change the answer
and that this version can't honour is refused; one that nobody knows is ignored and named in a response header.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import SamplingParams

NEUTRAL: tuple[Any, ...] = (None, False, [], {}, "", "none", "auto")
"""Values of an unsupported field that ask for nothing."""

SAMPLING_FIELDS = (
    "n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "allowed_token_ids", "skip_special_tokens",
)  # fmt: skip
"""Fields that go to SamplingParams as they are, when given."""


class StreamOptions(BaseModel):
    """include_usage: send one last chunk that holds the usage."""

    include_usage: bool = False


class GenerationRequest(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(extra="allow")

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[int, float] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: int = 0
    cache_salt: str | None = Field(default=None, max_length=1024)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self, *names: str) -> None:
        """Raise InvalidRequest for a field of these names that asks for something this version can't do."""
        for name in names:
            value = (self.model_extra or {}).get(name)
            if value not in NEUTRAL:
                raise InvalidRequest(f"{name} is not supported by this version; leave it out", field=name)

    def ignored_fields(self, *known: str) -> list[str]:
        """Fields in the body that nobody reads."""
        return sorted(set(self.model_extra or {}) - set(known))

    def _stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def _sampling(self, **changes: Any) -> SamplingParams:
        given = {name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        return SamplingParams(**given, stop=self._stop_strings(), logit_bias=self.logit_bias or {}, **changes)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool = False

    UNSUPPORTED: ClassVar[tuple[str, ...]] = ("suffix", "best_of", "response_format", "structured_outputs")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, each a text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is empty; give a text, token ids, or a list of them", field="prompt")
        return list(prompt)

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        prompt_logprobs = self.logprobs if self.echo else None
        return self._sampling(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=prompt_logprobs)


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    UNSUPPORTED: ClassVar[tuple[str, ...]] = (
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "response_format",
        "audio",
        "modalities",
    )

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        limit = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return self._sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)
