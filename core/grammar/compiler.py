"""Compiled grammars of one vocabulary, made in threads of their own and kept by content.

    start(form) ──> Compilation ── done? ──> matcher, copied for each choice that follows it
                        │                    or error, in words for the caller
                     a thread, a few at once

The door asks here to learn whether a form can be honoured; an engine to have its states. The vocabulary is read, and
llguidance imported, when the first form comes.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.base.errors import InvalidRequest, UserError
from octavo.core.base.structured import FIELD, StructuredOutput
from octavo.core.grammar.forms import grammar_of
from octavo.core.grammar.reasons import reason_of

logger = logging.getLogger(__name__)

MAX_KEPT = 256
"""Compiled grammars; the one that was asked for longest ago goes first."""

MAX_AT_ONCE = 2
"""Compilations that run: none can be ended, so these are the cores that the slowest forms can keep busy. Others wait,
and those that wait longer than anybody waits for them never begin."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokens.

    Attributes:
        token_bytes: what each id adds to a text.
        special_ids: ids that are no text.
        eos_ids: end a reply; at least one.
        bos_id: begins a text.
        encode: ids of a text, without what a tokenizer puts around it.
    """

    token_bytes: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    encode: Callable[[str], list[int]]


@dataclass(slots=True)
class Compilation:
    """A grammar on its way. Its thread writes matcher or error, then sets `done`; all others only read."""

    done: threading.Event = field(default_factory=threading.Event)
    matcher: Any = None
    error: str | None = None
    is_late: bool = False  # it was given up, and says nothing about the form


class FormTooSlow(InvalidRequest):
    """A form takes too long to compile; it may be right."""


class GrammarCompiler:
    """Compiles forms for one vocabulary. May be used from several threads.

    Args:
        read_vocabulary: called once, in a compiling thread. May raise UserError.
        patience_s: how long a compilation may wait for its turn.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary], patience_s: float = 10.0) -> None:
        self._read_vocabulary = read_vocabulary
        self._patience_s = patience_s
        self._kept: OrderedDict[StructuredOutput, Compilation] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._places = threading.Semaphore(MAX_AT_ONCE)
        self._tokens: tuple[Any, frozenset[str]] | None = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens; known once a grammar was compiled."""
        assert self._tokens is not None
        size: int = self._tokens[0].vocab_size
        return size

    def start(self, structured: StructuredOutput) -> Compilation:
        """The compilation of a form: done, running, or begun now."""
        with self._lock:
            if (found := self._kept.get(structured)) is not None:
                self._kept.move_to_end(structured)
                return found
            made = self._kept[structured] = Compilation()
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        # Not a pool: its threads would keep a process from ending.
        threading.Thread(target=self._compile, args=(structured, made), name="grammar", daemon=True).start()
        return made

    def check(self, structured: StructuredOutput, timeout_s: float) -> None:
        """Wait until a form is compiled.

        Raises:
            FormTooSlow: it takes longer than timeout_s.
            InvalidRequest: it can't be honoured, with the reason.
        """
        compilation = self.start(structured)
        if not compilation.done.wait(timeout_s):
            raise FormTooSlow(late(timeout_s), field=FIELD)
        if compilation.is_late:
            raise FormTooSlow(late(self._patience_s), field=FIELD)
        if compilation.error is not None:
            raise InvalidRequest(compilation.error, field=FIELD)

    def _compile(self, structured: StructuredOutput, result: Compilation) -> None:
        if not self._places.acquire(timeout=self._patience_s):
            with self._lock:  # who asks again begins anew
                if self._kept.get(structured) is result:
                    del self._kept[structured]
            result.error, result.is_late = late(self._patience_s), True
            result.done.set()
            return
        try:
            result.matcher = self._matcher(structured)
        except UserError as error:
            result.error = str(error)
        except ImportError:
            result.error = "structured output needs llguidance; pip install 'octavo[structured]'"
        except BaseException as error:  # a panic of the library's is a BaseException
            logger.debug("a form could not be compiled", exc_info=error)
            result.error = f"the form of the reply can't be compiled: {reason_of(str(error))}"
        finally:
            self._places.release()
        result.done.set()

    def _matcher(self, structured: StructuredOutput) -> Any:
        from llguidance import LLMatcher

        with self._reading:
            if self._tokens is None:
                self._tokens = _read_tokens(self._read_vocabulary())
        tokens, special_texts = self._tokens
        grammar = grammar_of(structured, special_texts)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokens)
        if not is_error and not messages:
            matcher = LLMatcher(tokens, grammar, log_level=0)
            if not matcher.is_error():
                first = matcher.deep_copy()
                first.compute_bitmask()
                if first.is_error():  # a rule that only goes in circles, for example
                    raise InvalidRequest(
                        "the form of the reply allows no text, or is too complex; give each rule and $ref an end",
                        field=FIELD,
                    )
                return matcher
            messages = [matcher.get_error()]
        raise InvalidRequest(f"the form of the reply can't be honoured: {reason_of(messages[0])}", field=FIELD)


def late(timeout_s: float) -> str:
    """Why a request whose grammar is not there in time is ended."""
    return f"the form of the reply takes longer than {timeout_s:g} s to compile; make its schema or grammar smaller"


def _read_tokens(vocabulary: Vocabulary) -> tuple[Any, frozenset[str]]:
    """llguidance's view of a vocabulary, and the texts of its special tokens."""
    from llguidance import LLTokenizer

    if not vocabulary.eos_ids:
        raise InvalidRequest("structured output needs a model with a token that ends a reply", field=FIELD)
    special = frozenset(vocabulary.token_bytes[i].decode("utf-8", "replace") for i in vocabulary.special_ids)
    tokens: Any = _Tokens(vocabulary)  # what the library asks of a TokenizerWrapper, and no more
    return LLTokenizer(tokens, eos_token=list(vocabulary.eos_ids)), special


class _Tokens:
    """A vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = vocabulary.bos_id
        self.tokens = list(vocabulary.token_bytes)
        self.special_token_ids = sorted(vocabulary.special_ids | set(vocabulary.eos_ids))
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)
