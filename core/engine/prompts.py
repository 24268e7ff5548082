"""The door: a prompt and its parameters become an EngineRequest, or one clear error.

Everything that can be known to be wrong before the engine sees a request is refused here: token ids, lengths,
parameters that need a tokenizer. A text is measured before it is tokenised, so that a huge one costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

from octavo.core.base.errors import InvalidRequest, NeverFits
from octavo.core.base.lora import LoRARequest
from octavo.core.base.params import SamplingParams
from octavo.core.base.structured import FIELD, StructuredOutput
from octavo.core.engine.grammars import vocabulary_of
from octavo.core.engine.observer import RequestReport
from octavo.core.engine.wire import EngineRequest
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.pool.pooler import Pooler
from octavo.core.text.spellings import BadWordSpeller
from octavo.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.core.text.chat import ChatTemplate

MAX_PRIORITY = 2**31 - 1

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class RequestOptions(TypedDict, total=False):
    """What a generating call may say of its requests besides how to sample.

    Attributes:
        priority: lower runs earlier, under the policy "priority".
        cache_salt: only requests of one salt share cached prefixes.
        lora_request: the low-rank adapter that they run with; one that is not loaded is read from its path, and stays.
        report: filled in with what became of them.
    """

    priority: int
    cache_salt: str | None
    lora_request: LoRARequest | None
    report: RequestReport | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the door has to know of a model.

    Attributes:
        vocab_size: valid token ids are below it.
        max_model_len: tokens of a prompt and its reply.
        eos_token_ids: end a reply.
        tokenizer: None for a model that serves token ids only.
        pooler: of a model that gives vectors and generates nothing.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer: Tokenizer | None
    pooler: Pooler | None = None


class PromptReader:
    """Reads prompts for one model. May be used from several threads.

    Args:
        model: what is served.
        compiler: of its vocabulary; None: one is made.
        grammar_timeout_seconds: how long the form of a structured reply may take to compile.
    """

    def __init__(
        self, model: ServedModel, compiler: GrammarCompiler | None = None, grammar_timeout_seconds: float = 10.0
    ) -> None:
        self._model = model
        self._grammar_timeout_s = grammar_timeout_seconds
        self._compiler = compiler or GrammarCompiler(
            lambda: vocabulary_of(self._model.tokenizer, self._model.eos_token_ids), grammar_timeout_seconds
        )

    def read(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> EngineRequest:
        """Check and tokenise one prompt.

        Raises:
            InvalidRequest: naming the field, the limit and the fix.
        """
        self._check_generates()
        return self.prepare(request_id, prompt, params, priority=priority, cache_salt=cache_salt)

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, priority: int, cache_salt: str | None
    ) -> EngineRequest:
        """The same, whatever the model gives. Raises InvalidRequest."""
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority is out of range; give a whole number between {-MAX_PRIORITY} and {MAX_PRIORITY}",
                field="priority",
            )
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=self.text_ids(prompt) if isinstance(prompt, str) else self._checked_ids(prompt),
            params=self._checked_params(params),
            eos_token_ids=self._model.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )

    def read_chat(
        self, messages: Sequence[Message], *, chat_template: str | None = None, **template_arguments: Any
    ) -> list[int]:
        """Token ids of a conversation, rendered by a chat template.

        Args:
            messages: oldest first.
            chat_template: in place of the model's own.
            template_arguments: of `ChatTemplate.render`.

        Raises:
            InvalidRequest: the model generates no text, has no template, or the template refuses the conversation.
            CheckpointError: the template that was given is too long or not valid jinja.
        """
        from octavo.core.text.chat import chat_template_of, encode_chat  # imports jinja2, which only chats need

        self._check_generates()
        tokenizer = self._tokenizer("messages")
        template = self._chat_template if chat_template is None else chat_template_of(tokenizer, chat_template)
        text = template.render(messages, **template_arguments)
        self._check_text_length(text, "messages")
        return encode_chat(tokenizer, text)

    def _check_generates(self) -> None:
        if self._model.pooler is not None:
            raise InvalidRequest(
                "this model gives vectors and generates no text; use embed, classify or score", field="model"
            )

    def text_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the tokenizer puts around it, or without. Raises InvalidRequest."""
        tokenizer = self._tokenizer("prompt")
        self._check_text_length(text, "prompt")
        return tokenizer.encode(text, add_special_tokens)

    def pair_ids(self, first: str, second: str) -> tuple[list[int], int]:
        """Token ids of a pair of texts, and how many of them belong to the first one. Raises InvalidRequest."""
        tokenizer = self._tokenizer("prompt")
        self._check_text_length(first, "queries")
        self._check_text_length(second, "documents")
        return tokenizer.encode_pair(first, second)

    def is_special(self, token_id: int) -> bool:
        """Whether a token stands for no text."""
        return token_id in self._tokenizer("prompt").special_ids

    def _check_text_length(self, text: str, field: str) -> None:
        """Refuse a text that can't fit even if each of its tokens is the longest there is."""
        limit = self._model.max_model_len
        if len(text) <= limit:
            return
        if len(text) > limit * self._longest_token_bytes:
            raise NeverFits(
                f"{field} has {len(text)} characters, which is more than max_model_len {limit} tokens can hold; "
                "shorten it",
                field=field,
            )

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        is_list = isinstance(token_ids, Sequence) and not isinstance(token_ids, bytes | bytearray)
        if not is_list or any(type(token_id) is not int for token_id in token_ids):
            raise InvalidRequest("prompt must be a string or a list of token ids", field="prompt")
        if len(token_ids) > self._model.max_model_len:  # here, so that a huge list costs nothing behind the door
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens, above max_model_len {self._model.max_model_len}; shorten it",
                field="prompt",
            )
        ids = list(token_ids)
        limit = self._model.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < limit:
            wrong = next(token_id for token_id in ids if not 0 <= token_id < limit)
            raise InvalidRequest(f"prompt has token id {wrong}, outside the vocabulary 0..{limit - 1}", field="prompt")
        return ids

    def _checked_params(self, params: SamplingParams) -> SamplingParams:
        if params.stop:
            self._tokenizer("stop")
        if params.bad_words:
            spellings = [tuple(ids) for ids in self._speller.spell(params.bad_words)]
            # A tokenizer may know more ids than the model has logits; those are never sampled.
            possible = [ids for ids in spellings if max(ids) < self._model.vocab_size]
            params = params.with_(bad_words_token_ids=(*params.bad_words_token_ids, *possible))
        params.validate(self._model.vocab_size)
        if params.structured is not None:
            self.check_form(params.structured)
        return params

    def check_form(self, structured: StructuredOutput) -> None:
        """Wait until a reply's form is compiled. Raises InvalidRequest where it can't be had."""
        self._tokenizer(FIELD)
        self._compiler.check(structured, self._grammar_timeout_s)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidRequest(f"{field} needs a tokenizer, and this model has none; give token ids", field=field)
        return self._model.tokenizer

    @cached_property
    def _longest_token_bytes(self) -> int:
        tokenizer = self._tokenizer("prompt")
        return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))

    @cached_property
    def _speller(self) -> BadWordSpeller:
        return BadWordSpeller(self._tokenizer("bad_words"))

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        from octavo.core.text.chat import chat_template_of

        return chat_template_of(self._tokenizer("messages"))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given."""
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
