"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from octavo.core.base.params import SamplingParams
from octavo.core.serve.schema import REFUSED, GenerationRequest, Prompts


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. max_tokens null fills the context; 0 generates nothing, which with echo scores a prompt."""

    UNSUPPORTED: ClassVar[Mapping[str, tuple[Any, ...]]] = {**REFUSED, "suffix": (), "best_of": (1,)}

    prompt: Prompts
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequest."""
        return self.sampling(
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )
