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
from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from octavo.core.serve.logprobs import ChatLogprobs, CompletionLogprobs
from octavo.core.text.tokenizer import Tokenizer

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


class CompletionReply:
    """Bodies and chunks of /v1/completions.

    Args:
        model: the served name.
        tokenizer: writes prompts and logprobs as text; None where token ids only are served.
        params: of every prompt; the choice i of prompt p has index p * n + i.
        echo: the prompt comes before each choice's text.
    """

    def __init__(self, model: str, tokenizer: Tokenizer | None, params: SamplingParams, *, echo: bool) -> None:
        self._head = _head("cmpl", "text_completion", model)
        self._tokenizer = tokenizer
        self._params = params
        self._echo = echo
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None]] = {}

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        choices = [self._choice(p, output, choice) for p, output in enumerate(outputs) for choice in output.outputs]
        return {**self._head, "choices": choices, "usage": usage_of(outputs).json()}

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[Json]:
        """See Reply."""
        return [{**self._head, "choices": [self._choice(prompt_index, piece, choice)]} for choice in piece.outputs]

    def usage_chunk(self, usage: Usage) -> Json:
        """See Reply."""
        return {**self._head, "choices": [], "usage": usage.json()}

    def _choice(self, prompt_index: int, output: RequestOutput, choice: CompletionOutput) -> Json:
        index = prompt_index * self._params.n + choice.index
        is_first = index not in self._logprobs
        if is_first:
            self._logprobs[index] = CompletionLogprobs(self._tokenizer)
        return {
            "index": index,
            "text": self._prompt_text(output) + choice.text if is_first and self._echo else choice.text,
            "logprobs": None if self._params.logprobs is None else self._scores(prompt_index, index, output, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def _scores(self, prompt_index: int, index: int, output: RequestOutput, choice: CompletionOutput) -> Json:
        """The logprobs of a piece; before a choice's first tokens those of an echoed prompt."""
        logprobs = self._logprobs[index]
        if output.prompt_logprobs is not None:  # they come once, with whichever choice is first
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        if self._echo and not logprobs.started:
            logprobs.add_prompt(output, self._prompt_logprobs[prompt_index])
        return logprobs.take(choice)

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


class ChatReply:
    """Bodies and chunks of /v1/chat/completions.

    Args:
        model: the served name.
        tokenizer: writes logprobs as text and bytes.
        params: of the conversation.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._head = _head("chatcmpl", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._logprobs = None if params.logprobs is None else ChatLogprobs(tokenizer, params)
        self._started: set[int] = set()

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        choices = [
            self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})
            for output in outputs
            for choice in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs).json()}

    def chunks(self, prompt_index: int, piece: RequestOutput) -> list[Json]:
        """See Reply. A choice's first chunk names the role."""
        return [
            {**self._chunk_head, "choices": [self._choice(choice, "delta", self._delta(choice))]}
            for choice in piece.outputs
        ]

    def usage_chunk(self, usage: Usage) -> Json:
        """See Reply."""
        return {**self._chunk_head, "choices": [], "usage": usage.json()}

    def _delta(self, choice: CompletionOutput) -> Json:
        if choice.index in self._started:
            return {"content": choice.text}
        self._started.add(choice.index)
        return {"role": "assistant", "content": choice.text}

    def _choice(self, choice: CompletionOutput, name: str, text: Json) -> Json:
        return {
            "index": choice.index,
            name: text,
            "logprobs": None if self._logprobs is None else self._logprobs.json(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def _head(prefix: str, kind: str, model: str) -> Json:
    """What every body and chunk of one reply begins with."""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}
