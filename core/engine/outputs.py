"""What callers get back: the records of a reply. Shaped like vLLM's, so that a script changes one import."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.base.params import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, natural log, of the model's raw distribution.

    Attributes:
        rank: 1 for the most likely token.
        decoded_token: its text alone; parts of characters show as U+FFFD. None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id -> its logprob: the token itself first, then the most likely ones, highest first."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice. In a stream: what it gained since the last piece; in a result: all of it.

    Attributes:
        index: which of the n choices.
        text: the text; empty without a tokenizer.
        token_ids: including the id that ended the choice.
        logprobs: one entry per token, when asked for.
        cumulative_logprob: sum over the tokens so far, when logprobs were asked for.
        finish_reason: None while it goes on.
        stop_reason: the stop string or stop token id that ended it; None for an EOS id or a limit.
        error: why it failed, with finish_reason ERROR.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's reply, or a piece of it.

    Attributes:
        prompt: the text given; None when token ids were given.
        prompt_logprobs: one entry per prompt token, the first None; when asked for, on the first piece and the result.
        outputs: the choices, by index; a piece holds only those that gained something.
        finished: every choice has ended.
        num_cached_tokens: prompt tokens found in the prefix cache.
        pooled: the vector of a pooling request, fp32 little-endian; see pooling_outputs.py.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    pooled: bytes | None = None
