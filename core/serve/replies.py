"""Engine outputs as what one endpoint answers: a whole body, or server-sent events.

    RequestOutputs ──> body()                 a whole reply

    RequestOutput  ──> events()  ┐
         ...                     ├ a stream: what each piece adds, then its end, or what went wrong and its end
                       end()     │
    Exception      ──> failure() ┘

One reply object serves one HTTP request and one of the two ways. It owns all that a stream's later events depend on,
the usage among them, and it alone knows how its API spells events: named or not, with a last one or none.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from octavo.core.base.errors import RequestFailed
from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import RequestOutput
from octavo.core.serve.failures import body_of

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

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(len(output.prompt_token_ids) for output in self._prompts.values())

    @property
    def cached_tokens(self) -> int:
        """Those of them that were found in the prefix cache."""
        return sum(output.num_cached_tokens for output in self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        """Tokens of the choices."""
        return self._completion_tokens

    def json(self) -> Json:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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
    """What turns engine outputs into the answers of one endpoint. Events are bytes as they go over the wire."""

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """The whole reply to all prompts."""

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """What a piece of one prompt's reply adds to the stream; may be empty. A piece that failed ends nothing."""

    def end(self) -> bytes:
        """What ends the stream behind the last piece."""

    def failure(self, error: Exception) -> bytes:
        """What ends the stream in its middle."""


DONE = b"data: [DONE]\n\n"
"""What ends the streams of completions and chat."""


def event(data: Json, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def failed_chunks(error: Exception) -> bytes:
    """What ends a stream of completions or chat in its middle."""
    return event(body_of(error)[1]) + DONE


def head(prefix: str, kind: str, model: str) -> Json:
    """What every body and chunk of one reply begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
