"""Logprobs as OpenAI's two endpoints shape them.

    completions   parallel lists: tokens, token_logprobs, top_logprobs, text_offset
    chat          one entry per token: token, logprob, bytes, top_logprobs

A token is part of the text unless it ended the choice by its id or is special and left out. The chat entries' bytes,
joined, are the UTF-8 of the text (up to a stop string, which may cut a token); a token that is no part of it has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.base.params import FinishReason, SamplingParams
from octavo.core.engine.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from octavo.core.serve.extras import best
from octavo.core.text.detokenizer import hidden_ids
from octavo.core.text.tokenizer import Tokenizer

Json = dict[str, Any]


def num_text_tokens(choice: CompletionOutput) -> int:
    """How many of a choice's tokens belong to its text: all but the one that ended it by its id."""
    ended_by_id = choice.finish_reason is FinishReason.STOP and not isinstance(choice.stop_reason, str)
    return len(choice.token_ids) - (ended_by_id and bool(choice.token_ids))


class ChatLogprobs:
    """The logprobs of chat completions.

    Args:
        tokenizer: writes tokens as text and bytes.
        params: `logprobs` is how many alternatives were asked for.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._num_top = params.logprobs or 0
        self._hidden = hidden_ids(tokenizer, params)

    def json(self, choice: CompletionOutput) -> Json:
        """The `logprobs` object of a choice, or of a piece of one."""
        text_tokens = num_text_tokens(choice)
        content = []
        for i, (token_id, position) in enumerate(zip(choice.token_ids, choice.logprobs or (), strict=True)):
            entry = self._entry(token_id, position[token_id])
            if i >= text_tokens or token_id in self._hidden:
                entry["bytes"] = None
            entry["top_logprobs"] = self._top(position)
            content.append(entry)
        return {"content": content, "refusal": None}

    def _top(self, position: Mapping[int, Logprob]) -> list[Json]:
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        return [self._entry(token_id, logprob) for token_id, logprob in ranked[: self._num_top]]

    def _entry(self, token_id: int, logprob: Logprob) -> Json:
        data = self._tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob.logprob, "bytes": list(data)}


class CompletionLogprobs:
    """The logprobs of one choice of a completion.

    Offsets count the characters before a token; a token that goes on with a begun character points behind it.

    Attributes:
        started: whether anything was taken in.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._offset = 0
        self._gathered = _empty()
        self.started = False

    def add_prompt(self, output: RequestOutput, positions: Sequence[TokenLogprobs | None], num_top: int) -> None:
        """Take in an echoed prompt with num_top alternatives for each token; its first token has no logprob."""
        self.started = True
        bos = None if self._tokenizer is None or output.prompt is None else self._tokenizer.bos_token_id
        for i, (token_id, position) in enumerate(zip(output.prompt_token_ids, positions, strict=True)):
            told = None if position is None else best(position, num_top)
            self._append(token_id, told, in_text=i > 0 or token_id != bos)

    def take(self, choice: CompletionOutput) -> Json:
        """The `logprobs` object of a choice, or of a piece of one, after what was added before."""
        self.started = True
        text_tokens = num_text_tokens(choice)
        for i, (token_id, position) in enumerate(zip(choice.token_ids, choice.logprobs or (), strict=True)):
            self._append(token_id, position, in_text=i < text_tokens)
        taken, self._gathered = self._gathered, _empty()
        return taken

    def _append(self, token_id: int, position: Mapping[int, Logprob] | None, *, in_text: bool) -> None:
        gathered = self._gathered
        gathered["tokens"].append(self._name(token_id))
        gathered["token_logprobs"].append(None if position is None else position[token_id].logprob)
        gathered["top_logprobs"].append(
            None if position is None else {self._name(i): entry.logprob for i, entry in position.items()}
        )
        gathered["text_offset"].append(self._offset)
        if in_text and self._tokenizer is not None:
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))

    def _name(self, token_id: int) -> str:
        """A token as text; one that is not valid UTF-8 by itself as OpenAI writes it, so that no two look alike."""
        if self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _empty() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
