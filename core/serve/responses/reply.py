"""Engine outputs as the JSON and the events of /v1/responses.

piece ──▶ BlockReader ──▶ steps ──▶ ResponseEvents          a stream
                          blocks ──▶ Items ──▶ response     a whole reply, and what a stream ends with
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, RequestOutput
from octavo.core.serve.blocks import BlockReader, Closed, Gained, Kind, Opened, Step
from octavo.core.serve.failures import body_of
from octavo.core.serve.logprobs import ChatLogprobs, num_text_tokens
from octavo.core.serve.replies import Json, Usage
from octavo.core.serve.responses.events import ResponseEvents
from octavo.core.serve.responses.output import Items
from octavo.core.serve.token_track import TokenTrack
from octavo.core.text.detokenizer import hidden_ids
from octavo.core.text.tokenizer import Tokenizer

_STATUSES = {None: "in_progress", FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}
"""Why it ended -> status; whatever else ends it has failed it."""


class ResponsesReply:
    """The reply to one request.

    Args:
        model: the served name.
        echo: what the response says of its request.
        reader: of the one choice.
        tokenizer: tells the bytes of tokens.
        params: with logprobs when they were asked for.
    """

    def __init__(
        self, model: str, echo: Json, reader: BlockReader, tokenizer: Tokenizer, params: SamplingParams
    ) -> None:
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
        }
        self._echo = echo
        self._reader = reader
        self._tokenizer = tokenizer
        self._hidden = hidden_ids(tokenizer, params)
        self._logprobs = None if params.logprobs is None else ChatLogprobs(tokenizer, params)
        self._entries: list[Json] = []  # of the tokens in the track
        self._track = TokenTrack()
        self._items = Items()
        self._events = ResponseEvents(self._items)
        self._usage: Usage | None = None
        self._reasoning_tokens = 0
        self._finish: FinishReason | None = None

    def body(self, outputs: Sequence[RequestOutput]) -> Json:
        """See Reply."""
        for output in outputs:
            self._take(0, output)
        return self._response(_STATUSES.get(self._finish, "failed"))

    def events(self, prompt_index: int, piece: RequestOutput) -> bytes:
        """See Reply."""
        began = b""
        if self._usage is None:
            response = self._response("in_progress")
            began = self._events.response("created", response) + self._events.response("in_progress", response)
        return began + b"".join(self._take(prompt_index, piece))

    def end(self) -> bytes:
        """See Reply."""
        status = _STATUSES.get(self._finish, "failed")
        return self._events.response(status, self._response(status))

    def failure(self, error: Exception) -> bytes:
        """See Reply."""
        message = body_of(error)[1]["error"]["message"]
        response = self._response("failed") | {"error": {"code": "server_error", "message": message}}
        return self._events.response("failed", response)

    def _take(self, prompt_index: int, output: RequestOutput) -> list[bytes]:
        """Take in a reply or a piece of one, and give its events."""
        self._usage = self._usage or Usage()
        self._usage.add(prompt_index, output)
        return [event for choice in output.outputs for event in self._take_choice(choice)]

    def _take_choice(self, choice: CompletionOutput) -> list[bytes]:
        self._track_tokens(choice)
        self._finish = choice.finish_reason
        steps = self._reader.feed(choice.text, ended=choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH))
        return [self._event(step) for step in steps]

    def _track_tokens(self, choice: CompletionOutput) -> None:
        """Remember the tokens that belong to the text, and their logprobs."""
        entries = None if self._logprobs is None else self._logprobs.json(choice)["content"]
        for i, token_id in enumerate(choice.token_ids[: num_text_tokens(choice)]):
            if token_id not in self._hidden:
                self._track.add(self._tokenizer.token_bytes(token_id))
                self._entries += [] if entries is None else [entries[i]]

    def _event(self, step: Step) -> bytes:
        if isinstance(step, Opened):
            return self._events.opened(step.block)
        if isinstance(step, Closed):
            return self._events.closed(step.block, self._status_of(step.block.index))
        return self._events.gained(step.block, step.text, self._gain(step))

    def _gain(self, step: Gained) -> list[Json]:
        """Count the tokens of a gain of words; the logprobs of those that are text."""
        if step.block.kind is Kind.CALL:
            return []
        tokens = self._track.take(step.text)
        if step.block.kind is Kind.REASONING:
            self._reasoning_tokens += len(tokens)
            return []
        logprobs = self._entries[tokens.start : tokens.stop]
        self._items.logprobs[step.block.index] += logprobs
        return logprobs

    def _status_of(self, index: int) -> str:
        """Only the last block can have been cut."""
        is_last = index == len(self._reader.blocks) - 1
        return "incomplete" if is_last and self._finish is not FinishReason.STOP else "completed"

    def _response(self, status: str) -> Json:
        is_over = self._usage is not None and status != "in_progress"
        return {
            **self._head,
            **self._echo,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [self._items.whole(block, self._status_of(block.index)) for block in self._reader.blocks],
            "usage": self._usage_json(self._usage) if is_over and self._usage is not None else None,
        }

    def _usage_json(self, usage: Usage) -> Json:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
