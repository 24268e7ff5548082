"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.params import MAX_N, SamplingParams
from octavo.core.serve.schema import MAX_CHOICES, REFUSED, GenerationRequest, Prompts


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. max_tokens null fills the context; 0 generates nothing, which with echo scores a prompt."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "suffix": ()}

    prompt: Prompts
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1, le=MAX_N)
    add_special_tokens: bool = True

    @property
    def num_tried(self) -> int:
        """Choices that are generated for each prompt, of which the likeliest `n` are shown."""
        return self.best_of or self.n or 1

    def refuse_unsupported(self) -> None:
        """See CheckedBody."""
        super().refuse_unsupported()
        shown = 1 if self.n is None else self.n
        if self.num_tried < shown:
            raise InvalidRequest("best_of is below n; raise it", field="best_of")
        if self.stream and self.num_tried > shown:
            raise InvalidRequest("best_of above n can't be streamed; set stream to false", field="best_of")
        if len(self.prompt) * self.num_tried > MAX_CHOICES:
            raise InvalidRequest(
                f"the prompts ask for more than {MAX_CHOICES} choices together; lower n, or send fewer",
                field="n" if self.best_of is None else "best_of",
            )

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        wanted = [each for each in (self.prompt_logprobs, self.logprobs if self.echo else None) if each is not None]
        asked: dict[str, Any] = {} if self.n is None and self.best_of is None else {"n": self.num_tried}
        return self.sampling(
            max_tokens=self.max_tokens,
            logprobs=0 if self.logprobs is None and self.num_tried > (self.n or 1) else self.logprobs,
            prompt_logprobs=max(wanted, default=None),
            **asked,
        )
