"""Engine outputs as the JSON of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.base.params import SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.logprobs import ChatLogprobs
from octavo.core.serve.replies import Json, Usage, head, usage_of
from octavo.core.text.tokenizer import Tokenizer


class ChatReply:
    """Bodies and chunks of /v1/chat/completions.

    Args:
        model: the served name.
        tokenizer: writes logprobs as text and bytes.
        params: of the conversation.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._head = head("chatcmpl", "chat.completion", model)
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
