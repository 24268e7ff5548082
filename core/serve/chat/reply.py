"""Engine outputs as the JSON of /v1/chat/completions.

    text of choice i ──▶ its own parser ──▶ content, reasoning, tool_calls
    tokens of choice i ──▶ logprobs, which tell of all tokens, those of marks and calls too

A choice's first chunk tells the role and nothing else. A piece whose text is held back, since it may become a call, is
a chunk only if it brings logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.chat.reasoning_count import ReasoningCount
from octavo.core.serve.extras import Extras
from octavo.core.serve.logprobs import ChatLogprobs
from octavo.core.serve.replies import DONE, Json, Usage, event, failed_chunks, head, usage_of
from octavo.core.serve.tools.message import ChoiceMessage
from octavo.core.text.tokenizer import Tokenizer


class ChatReply:
    """Bodies and chunks of /v1/chat/completions.

    Args:
        model: the served name.
        tokenizer: writes tokens as text and bytes.
        params: of the conversation.
        open_message: makes the message of a choice.
        echoed: comes before each choice's content.
        extras: what is told besides.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        params: SamplingParams,
        open_message: Callable[[], ChoiceMessage],
        *,
        echoed: str = "",
        extras: Extras,
    ) -> None:
        self._head = head("chatcmpl", "chat.completion", model)
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        self._logprobs = None if params.logprobs is None else ChatLogprobs(tokenizer, params)
        self._open_message = open_message
        self._messages: dict[int, ChoiceMessage] = {}
        self._echoed = echoed
        self._extras = extras
        self._tells_prompt = extras.token_ids  # a stream does, in its first chunk
        self._usage = Usage()
        self._reasoning = ReasoningCount(tokenizer, params)

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        choices = [self._whole(choice) for output in outputs for choice in output.outputs]
        (output,) = outputs  # one conversation
        told = self._extras.of_prompt(output.prompt_token_ids, output.prompt_logprobs)
        return {**self._head, "choices": choices, "usage": self._usage_json(usage_of(outputs)), **told}

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """See Reply."""
        self._usage.add(prompt_index, piece)
        return b"".join(self._chunks(piece, choice) for choice in piece.outputs)

    def end(self) -> bytes:
        """See Reply."""
        usage = {**self._chunk_head, "choices": [], "usage": self._usage_json(self._usage)}
        return (event(usage) if self._extras.usage else b"") + DONE

    def failure(self, error: Exception) -> bytes:
        """See Reply."""
        return failed_chunks(error)

    def _usage_json(self, usage: Usage) -> Json:
        return {**usage.json(), "completion_tokens_details": {"reasoning_tokens": self._reasoning.tokens}}

    def _whole(self, choice: CompletionOutput) -> Json:
        message = self._open_message()
        written = message.message(choice.text)
        self._reasoning.take(choice, message.reasoned)
        if self._echoed:
            written["content"] = self._echoed + (written["content"] or "")
        return self._choice(choice, "message", written, finish_reason(choice, message))

    def _chunks(self, piece: RequestOutput, choice: CompletionOutput) -> bytes:
        """The chunks of what a choice gained."""
        events = b""
        message = self._messages.get(choice.index)
        if message is None:
            message = self._messages[choice.index] = self._open_message()
            told = self._extras.of_prompt(piece.prompt_token_ids, None) if self._tells_prompt else {}
            self._tells_prompt = False
            events = event(self._chunk_of(_role_of(choice, self._echoed)) | told)
        gained = message.delta(choice.text, ended=choice.finish_reason is not None)
        self._reasoning.take(choice, message.reasoned)
        tells_tokens = self._logprobs is not None or self._extras.token_ids
        if gained or choice.finish_reason is not None or (tells_tokens and choice.token_ids):
            events += event(self._chunk_of(self._choice(choice, "delta", gained, finish_reason(choice, message))))
        return events

    def _chunk_of(self, choice: Json) -> Json:
        usage: Json = {}
        if self._extras.usage:
            usage = {"usage": self._usage_json(self._usage) if self._extras.running_usage else None}
        return {**self._chunk_head, "choices": [choice], **usage}

    def _choice(self, choice: CompletionOutput, name: str, text: Json, finished: str | None) -> Json:
        return {
            "index": choice.index,
            name: text,
            "logprobs": None if self._logprobs is None else self._logprobs.json(choice),
            "finish_reason": finished,
            "stop_reason": choice.stop_reason,
            **self._extras.of_choice(choice.token_ids),
        }


def finish_reason(choice: CompletionOutput, message: ChoiceMessage) -> str | None:
    """Why a choice ended, by one rule for whole replies and streams.

    tool_calls only where it ended by itself and a call was given; length where a limit cut it, calls or not.
    """
    return "tool_calls" if choice.finish_reason is FinishReason.STOP and message.num_calls else choice.finish_reason


def _role_of(choice: CompletionOutput, echoed: str) -> Json:
    """The first chunk of a choice."""
    delta = {"role": "assistant", "content": echoed}
    return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
