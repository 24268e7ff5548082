"""Engine outputs as OpenAI's JSON: bodies, stream chunks, usage.

    RequestOutputs ──> body()      a whole reply
    RequestOutput  ──> chunks()    what one piece adds to a stream
    Usage          ──> usage_chunk()

One reply object serves one HTTP request; it remembers what a stream's later chunks depend on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from octavo.core.base.errors import RequestFailed
from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import RequestOutput

Json = dict[str, Any]


class Usage:
    """Tokens of one HTTP request: each prompt once, the tokens of all choices."""

    def __init__(self) -> None:
        self._prompts: dict[int, RequestOutput] = {}
        self._completion_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count a reply, or a piece of one."""
        self._prompts[prompt_index] = output
        self._completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)

    def json(self) -> Json:
        """OpenAI's usage object."""
        prompt_tokens = sum(len(output.prompt_token_ids) for output in self._prompts.values())
        cached_tokens = sum(output.num_cached_tokens for output in self._prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """The usage of finished requests."""
    usage = Usage()
    for index, output in enumerate(outputs):
        usage.add(index, output)
    return usage


def check_choices(output: RequestOutput) -> None:
    """Raise RequestFailed when a choice failed by itself."""
    for choice in output.outputs:
        if choice.finish_reason is FinishReason.ERROR:
            raise RequestFailed(choice.error or "the request failed")


class Reply(Protocol):
    """What turns engine outputs into the JSON of one endpoint."""

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """The whole reply to all prompts."""

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[Json]:
        """What a piece of one prompt's reply adds to the stream."""

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that includes usage."""


def head(prefix: str, kind: str, model: str) -> Json:
    """What every body and chunk of one reply begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
