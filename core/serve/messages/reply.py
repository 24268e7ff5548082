"""Engine outputs as the JSON and the events of /v1/messages.

message_start
  content_block_start    a block of text, thinking or tool_use, and empty
  content_block_delta... text_delta, thinking_delta, input_json_delta
  content_block_stop     ...
message_delta            why it ended, and the usage
message_stop             or, where something went wrong, an event `error` and nothing more
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence

from octavo.core.base.params import FinishReason
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.blocks import Block, BlockReader, Closed, Kind, Opened, Step
from octavo.core.serve.failures import body_of
from octavo.core.serve.messages.errors import messages_error
from octavo.core.serve.replies import Json, Usage, event

_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessagesReply:
    """The reply to one request.

    Args:
        model: the served name.
        reader: of the one choice.
        max_tokens: that were allowed.
    """

    def __init__(self, model: str, reader: BlockReader, max_tokens: int) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._reader = reader
        self._max_tokens = max_tokens
        self._usage: Usage | None = None
        self._last: CompletionOutput | None = None

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        for output in outputs:
            self._take(0, output)
        content = [_content(block, block.text) for block in self._reader.blocks]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage_json()}

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """See Reply."""
        is_first = self._usage is None
        steps = self._take(prompt_index, piece)
        events = [_event("message_start", message=self._start())] if is_first else []
        return b"".join([*events, *map(_step_event, steps)])

    def end(self) -> bytes:
        """See Reply."""
        return _event("message_delta", delta=self._stop(), usage=self._usage_json()) + _event("message_stop")

    def failure(self, error: Exception) -> bytes:
        """See Reply."""
        return event(messages_error(*body_of(error)), "error")

    def _take(self, prompt_index: int, output: RequestOutput) -> list[Step]:
        """Take in a reply or a piece of one."""
        self._usage = self._usage or Usage()
        self._usage.add(prompt_index, output)
        steps: list[Step] = []
        for choice in output.outputs:
            self._last = choice
            ended = choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            steps += self._reader.feed(choice.text, ended=ended)
        return steps

    def _start(self) -> Json:
        usage = {**self._usage_json(), "output_tokens": 0}
        return {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _stop(self) -> Json:
        """Why it ended."""
        assert self._last is not None  # it has ended
        assert self._usage is not None
        word = self._last.stop_reason
        if self._last.finish_reason is FinishReason.LENGTH:
            is_full = self._usage.completion_tokens >= self._max_tokens
            return {"stop_reason": "max_tokens" if is_full else "model_context_window_exceeded", "stop_sequence": None}
        if isinstance(word, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": word}
        return {"stop_reason": "tool_use" if self._reader.has_calls else "end_turn", "stop_sequence": None}

    def _usage_json(self) -> Json:
        """Tokens that were found in the prefix cache are not counted among the input's, as in Anthropic's API."""
        usage = self._usage or Usage()
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _step_event(step: Step) -> bytes:
    index = step.block.index
    if isinstance(step, Opened):
        return _event("content_block_start", index=index, content_block=_content(step.block, ""))
    if isinstance(step, Closed):
        return _event("content_block_stop", index=index)
    kind, key = _DELTAS[step.block.kind]
    return _event("content_block_delta", index=index, delta={"type": kind, key: step.text})


def _content(block: Block, text: str) -> Json:
    """A block as the API shows it, holding some text."""
    if block.kind is Kind.CALL:
        return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _object(text)}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text, "citations": None}


def _object(text: str) -> Json:
    """The arguments of a call; those that max_tokens cut, which stop_reason tells, are none."""
    try:
        value: Json = json.loads(text)
    except ValueError:
        return {}
    return value


def _event(name: str, **data: object) -> bytes:
    return event({"type": name, **data}, name)
