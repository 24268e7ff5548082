"""What a request asks of the sampler, and why a request ended.

`SamplingParams` is validated once, at the door, by `validate()`; everything behind it may trust its ranges.
Field names and meanings follow vLLM's and OpenAI's, so that a script changes one import.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import FIELD, StructuredOutput

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any  # what reads the types at run time, as messages between processes do, must find one without torch

MAX_N = 128
MAX_LOGPROBS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_SEED = 2**64 - 1
MAX_REPETITION_PENALTY = 1e6

_REAL_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MAX_COUNT = 2**31 - 1
"""Of tokens, where nothing else bounds them: far beyond any context, and a number that every wire format carries."""

LogitsProcessor = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
"""(prompt_token_ids, output_token_ids, logits_V fp32) -> logits_V; runs before penalties and temperature."""


class FinishReason(enum.StrEnum):
    """Why a choice ended, in OpenAI's words where they exist."""

    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the caller went away or asked for it
    ERROR = "error"  # this request alone failed (NaN logits, …)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of one request.

    Attributes:
        n: how many independent choices to generate for the prompt.
        max_tokens: upper limit of generated tokens; None fills what max_model_len leaves; 0 only scores the prompt.
        min_tokens: no EOS id, stop id or stop string ends the choice before this many tokens, unless its form leaves
            nothing else.
        temperature: 0 is greedy (ties take the lowest id); values below 1e-5 are treated as 0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p; in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one; in [0, 1].
        repetition_penalty: in (0, 1e6]; > 1 discourages tokens of prompt and output (Keskar et al. 2019, CTRL).
        presence_penalty, frequency_penalty: in [-2, 2]; on output tokens only.
        seed: makes the choice reproducible, whatever shares the batch; None draws one at submission.
        stop: strings that end a choice; the earliest match wins.
        stop_token_ids: further token ids that end a choice (the token stays out of the text).
        include_stop_str_in_output: keep the matched stop string in the text.
        ignore_eos: EOS ids do not end the choice.
        logprobs: also report this many most likely tokens per position (None: no logprobs; 0: the chosen one).
        prompt_logprobs: the same for each prompt position.
        logit_bias: token id -> addend in [-100, 100].
        allowed_token_ids: only these ids may be sampled.
        bad_words: strings that must not appear, in any tokenisation with or without a leading space.
        bad_words_token_ids: the same as token sequences; where a tokenizer is there, bad_words are added to it.
        skip_special_tokens: leave special tokens out of the text.
        visible_special_token_ids: special tokens that stay in it all the same: a parser of the text needs them.
        logits_processors: callables applied in order to a request's row; in-process engines only.
        structured: the form that the whole reply must have; where it is complete, only EOS ids may follow.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    visible_special_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        # Accept what callers naturally write (a list, one string) and hold immutable values.
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        for name in ("stop_token_ids", "bad_words", "logits_processors", "visible_special_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "bad_words_token_ids", tuple(tuple(ids) for ids in self.bad_words_token_ids or ()))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if isinstance(self.structured, Mapping):  # as messages between processes carry it
            object.__setattr__(self, "structured", StructuredOutput(**self.structured))
        self._check_ranges()
        self._check_structured()
        for name in _REAL_NUMBERS:  # temperature=1 is a float to whoever computes with it
            object.__setattr__(self, name, float(getattr(self, name)))

    @property
    def greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < 1e-5

    @property
    def penalises(self) -> bool:
        """Whether tokens that the text has already are made less likely, or more."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def edits_logits(self) -> bool:
        """Whether anything but temperature, filters and min_tokens changes the logits that a token is drawn from."""
        return (
            self.penalises
            or self.allowed_token_ids is not None
            or bool(self.logits_processors or self.logit_bias or self.bad_words_token_ids)
        )

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    def _check_ranges(self) -> None:
        _whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, MAX_COUNT)
        _whole("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower it", field="min_tokens"
            )
        _within("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, -1, MAX_COUNT)
        _within("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidRequest(f"top_p is {self.top_p}; give a value in (0, 1]", field="top_p")
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY)
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty is 0; give a value above 0", field="repetition_penalty")
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        self._check_lists()

    def _check_structured(self) -> None:
        if self.structured is None:
            return
        if not isinstance(self.structured, StructuredOutput):
            raise InvalidRequest("structured must be a StructuredOutput", field=FIELD)
        if self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos can't be honoured with structured output, whose end is an EOS id; leave one of them out",
                field="ignore_eos",
            )

    def _check_lists(self) -> None:
        _whole("len(stop)", len(self.stop), 0, MAX_STOP_STRINGS)
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"stop strings must be non-empty and at most {MAX_STOP_STRING_CHARS} characters", field="stop"
                )
        for value in self.logit_bias.values():
            _within("logit_bias", value, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty; leave it out or name at least one id", field="allowed_token_ids"
            )
        if any(not isinstance(word, str) or not word for word in self.bad_words) or not all(self.bad_words_token_ids):
            raise InvalidRequest("bad_words must be non-empty strings", field="bad_words")

    def validate(self, vocab_size: int) -> None:
        """Check every token id against the vocabulary.

        Raises:
            InvalidRequest: naming the field and the valid range.
        """
        bad_ids = tuple(token_id for sequence in self.bad_words_token_ids for token_id in sequence)
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words_token_ids", bad_ids),
        ):
            for token_id in ids:
                if not isinstance(token_id, int):
                    raise InvalidRequest(f"{name} has {token_id!r}, which is no token id", field=name)
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token_id}, outside the vocabulary 0..{vocab_size - 1}", field=name
                    )


def _biases(logit_bias: Mapping[Any, Any] | None) -> dict[int, float]:
    """Token id -> addend; JSON's keys are strings."""
    try:
        return {int(token_id): float(addend) for token_id, addend in (logit_bias or {}).items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"logit_bias must map token ids to numbers between -100 and 100: {error}", field="logit_bias"
        ) from error


def _within(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidRequest unless low <= value <= high (NaN fails)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}; give a number between {low} and {high}", field=name)


def _whole(name: str, value: int, low: int, high: int) -> None:
    """Raise InvalidRequest unless value is an int and low <= value <= high."""
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}; give a whole number between {low} and {high}", field=name)
