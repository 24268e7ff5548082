"""Engine outputs as OpenAI's JSON: bodies, stream chunks, logprobs, usage.

RequestOutput(s) ──> completion_body / chat_body          a whole reply
RequestOutput    ──> completion_chunks / chat_chunks      what one piece adds to a stream
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every body and chunk of one reply begins with."""

    prefix: str
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def json(self, kind: str) -> Json:
        """The common fields of a body of that kind."""
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


@dataclass(slots=True)
class Usage:
    """Tokens of one HTTP request: each prompt once, the tokens of all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

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
    for output in outputs:
        usage.prompt_tokens += len(output.prompt_token_ids)
        usage.cached_tokens += output.num_cached_tokens
        usage.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
    return usage


class CompletionReply:
    """Bodies and chunks of /v1/completions.

    Args:
        head: of this reply.
        tokenizer: writes logprobs as text.
        n: choices per prompt; the choice i of prompt p has index p * n + i.
        echo: the prompt comes before each choice's text.
    """

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer | None, n: int, *, echo: bool) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._n = n
        self._echo = echo
        self._offsets: dict[int, int] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """The whole reply to all prompts."""
        choices = [
            self._choice(p, output, choice, first=True) for p, output in enumerate(outputs) for choice in output.outputs
        ]
        return {**self._head.json("text_completion"), "choices": choices, "usage": usage_of(outputs).json()}

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[Json]:
        """What a piece of one prompt's reply adds to the stream."""
        return [
            {**self._head.json("text_completion"), "choices": [self._choice(prompt_index, piece, choice, first=False)]}
            for choice in piece.outputs
        ]

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that includes usage."""
        return {**self._head.json("text_completion"), "choices": [], "usage": usage.json()}

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput, *, first: bool) -> Json:
        index = prompt_index * self._n + choice.index
        text, logprobs = choice.text, list(zip(choice.token_ids, choice.logprobs or (), strict=False))
        if self._echo and (first or index not in self._offsets):
            text = self._prompt_text(output) + text
            prompt_logprobs = output.prompt_logprobs or [None] * 0
            logprobs = [*zip(output.prompt_token_ids, prompt_logprobs, strict=False), *logprobs]  # type: ignore[list-item]
        offset = self._offsets.setdefault(index, 0)
        self._offsets[index] += len(text)
        wants_logprobs = choice.logprobs is not None or output.prompt_logprobs is not None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(logprobs, offset) if wants_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)

    def _logprobs(self, entries: Sequence[tuple[int, TokenLogprobs | None]], offset: int) -> Json:
        tokens = [self._text(token_id) for token_id, _ in entries]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if logprobs is None else logprobs[token_id].logprob for token_id, logprobs in entries
            ],
            "top_logprobs": [
                None if logprobs is None else {self._text(i): entry.logprob for i, entry in logprobs.items()}
                for _, logprobs in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)


class ChatReply:
    """Bodies and chunks of /v1/chat/completions.

    Args:
        head: of this reply.
        tokenizer: writes logprobs as text and bytes.
        top_logprobs: how many alternatives were asked for.
    """

    def __init__(self, head: ReplyHead, tokenizer: Tokenizer, top_logprobs: int) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._top_logprobs = top_logprobs
        self._started: set[int] = set()

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """The whole reply."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text},
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for output in outputs
            for choice in output.outputs
        ]
        return {**self._head.json("chat.completion"), "choices": choices, "usage": usage_of(outputs).json()}

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[Json]:
        """What a piece of the reply adds to the stream; a choice's first chunk names the role."""
        return [
            {**self._head.json("chat.completion.chunk"), "choices": [self._chunk_choice(choice)]}
            for choice in piece.outputs
        ]

    def usage_chunk(self, usage: Usage) -> Json:
        """The last chunk of a stream that includes usage."""
        return {**self._head.json("chat.completion.chunk"), "choices": [], "usage": usage.json()}

    def _chunk_choice(self, choice: CompletionOutput) -> Json:
        delta: Json = {"content": choice.text}
        if choice.index not in self._started:
            self._started.add(choice.index)
            delta = {"role": "assistant", **delta}
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _logprobs(self, choice: CompletionOutput) -> Json | None:
        if choice.logprobs is None:
            return None
        content = []
        for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
            top = [self._entry(i, entry.logprob) for i, entry in position.items() if entry.rank <= self._top_logprobs]
            chosen = self._entry(token_id, position[token_id].logprob)
            content.append({**chosen, "top_logprobs": sorted(top, key=lambda entry: -entry["logprob"])})
        return {"content": content}

    def _entry(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": self._tokenizer.token_text(token_id), "logprob": logprob, "bytes": list(data)}
