"""One request to a server, each of its moments timed.

    begun ── connected, sent ── first text ── text ── text ── last text ── end of the stream
      ├─connect─┘                 │└──itl──┘└─itl──┘                         │
      ├──────────ttft─────────────┘                                          │
      └──────────────────────────── e2e ─────────────────────────────────────┘    tpot: (last − first) / (tokens − 1)

An event is timed when its bytes are here, before they are parsed; what a server sends in one packet has one moment.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from octavo.core.cli.serving.requests import Ask
from octavo.core.cli.serving.wire import BrokenReply, Connection, Target
from octavo.core.cli.sse import EventReader

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(slots=True)
class Sample:
    """What one request came to. Moments are seconds of time.perf_counter().

    Attributes:
        begun, connected, ended: when it set out, could be sent, and had come to [DONE] or failed.
        texts: when each event with text came.
        error: why it has no place in the figures; None where it has.
        in_tokens, out_tokens, cached_tokens: as the server counts them; None where it does not.
        num_events: in all, with those that bring no text.
    """

    begun: float = 0.0
    connected: float = 0.0
    ended: float = 0.0
    texts: list[float] = field(default_factory=list)
    error: str | None = None
    in_tokens: int | None = None
    out_tokens: int | None = None
    cached_tokens: int | None = None
    num_events: int = 0

    @property
    def tokens(self) -> int:
        """Of the reply: the server's count, or else one for each event with text."""
        return len(self.texts) if self.out_tokens is None else self.out_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first text; of a reply without any, to its end."""
        return (self.texts[0] if self.texts else self.ended) - self.begun

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first one; None below two tokens."""
        if self.tokens < 2 or len(self.texts) < 2:
            return None
        return (self.texts[-1] - self.texts[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events with text."""
        return [later - earlier for earlier, later in pairwise(self.texts)]

    @property
    def e2e(self) -> float:
        """Seconds to the end of the stream."""
        return self.ended - self.begun


class Prober:
    """Sends requests to one server, each on a connection of its own.

    Args:
        target: the server.
        model: to ask for.
        endpoint: a key of PATHS.
        fields: further fields of every body.
        timeout_s: after which a request counts as failed.
    """

    def __init__(self, target: Target, model: str, endpoint: str, fields: Mapping[str, Any], timeout_s: float) -> None:
        self._target = target
        self._path = PATHS[endpoint]
        self._is_chat = endpoint == "chat"
        self._fields = {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}
        self._timeout_s = timeout_s

    async def send(self, ask: Ask) -> Sample:
        """Send one request and take its whole reply; failures are samples too."""
        content = json.dumps(self._body(ask)).encode()  # before the clock starts
        sample = Sample(begun=time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._receive(content, sample)
        except TimeoutError:
            sample.error = "timeout"
        except (BrokenReply, OSError):
            sample.error = "broken off" if sample.connected else "no connection"
        sample.ended = sample.ended or time.perf_counter()
        return sample

    def _body(self, ask: Ask) -> dict[str, Any]:
        prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if self._is_chat else {"prompt": ask.prompt}
        return {**prompt, "max_tokens": ask.max_tokens, **self._fields}

    async def _receive(self, content: bytes, sample: Sample) -> None:
        reader, done = EventReader(), False
        async with Connection(self._target) as connection:
            sample.connected = time.perf_counter()
            reply = await connection.post(self._path, content)
            if reply.status != 200:
                sample.error = f"status {reply.status}"
                return
            async with aclosing(reply.parts) as parts:
                async for part in parts:
                    now = time.perf_counter()
                    for event in reader.feed(part):
                        if event.data == "[DONE]":
                            done, sample.ended = True, now
                        else:
                            self._read(event.data, now, sample)
        if sample.error is None and not done:
            sample.error = "broken off"
        elif sample.error is None and not sample.tokens:
            sample.error = "no token"

    def _read(self, data: str, now: float, sample: Sample) -> None:
        sample.num_events += 1
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                sample.error = "error event"
            if any(map(_has_text, chunk.get("choices") or ())):
                sample.texts.append(now)
            if usage := chunk.get("usage"):
                sample.in_tokens, sample.out_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
                sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except (ValueError, AttributeError):
            sample.error = "no JSON"


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or choice
    return any(delta.get(name) for name in ("text", "content", "reasoning", "reasoning_content", "tool_calls"))
