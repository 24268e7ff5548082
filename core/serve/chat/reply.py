"""Engine outputs as the JSON of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.base.params import SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.logprobs import ChatLogprobs
from octavo.core.serve.replies import DONE, Json, Usage, event, failed_chunks, head, usage_of
from octavo.core.text.tokenizer import Tokenizer


class ChatReply:
    """Bodies and chunks of /v1/chat/completions.

    Args:
        model: the served name.
        tokenizer: writes logprobs as text and bytes.
        params: of the conversation.
        include_usage: a stream ends with a chunk of usage.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams, *, include_usage: bool) -> None:
        self._head = head("chatcmpl", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._logprobs = None if params.logprobs is None else ChatLogprobs(tokenizer, params)
        self._started: set[int] = set()
        self._include_usage = include_usage
        self._usage = Usage()

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        choices = [
            self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})
            for output in outputs
            for choice in output.outputs
        ]
        return {**self._head, "choices": choices, "usage": usage_of(outputs).json()}

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """See Reply. A choice's first chunk names the role."""
        self._usage.add(prompt_index, piece)
        return b"".join(
            event({**self._chunk_head, "choices": [self._choice(choice, "delta", self._delta(choice))]})
            for choice in piece.outputs
        )

    def end(self) -> bytes:
        """See Reply."""
        usage = {**self._chunk_head, "choices": [], "usage": self._usage.json()}
        return (event(usage) if self._include_usage else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        """See Reply."""
        return failed_chunks(error)

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
