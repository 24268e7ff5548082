"""An engine's grammars in its steps: masks go out with the scheduler's output, and drawn tokens come back.

    schedule ──> mask ──> execute ──> update ──> advance

All of it happens in the engine, so that ranks and devices know bits alone. The model's tokenizer, which an engine has
no other need of, is read from its files when the first request with a form comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import InvalidRequest
from octavo.core.base.structured import FIELD
from octavo.core.engine.loading import open_model, read_text_side
from octavo.core.grammar.book import GrammarBook
from octavo.core.grammar.compiler import GrammarCompiler, Vocabulary
from octavo.core.sched.output import RequestDelta, SchedulerOutput
from octavo.core.text.tokenizer import Tokenizer


class Grammars:
    """The grammars of one engine.

    Attributes:
        book: of its choices.
    """

    def __init__(self, config: EngineConfig) -> None:
        compiler = GrammarCompiler(partial(_read_vocabulary, config), config.grammar_timeout_seconds)
        self.book = GrammarBook(compiler, config.grammar_timeout_seconds, config.num_threads)

    def mask(self, scheduled: SchedulerOutput) -> tuple[SchedulerOutput, dict[str, str]]:
        """The step with the masks of its choices, and the choices that can't go on, with why.

        Without work, waits a moment for a grammar that is being compiled.
        """
        if not scheduled.total_num_scheduled_tokens:
            self.book.wait()
            return scheduled, {}
        masks, failed = self.book.masks(scheduled.num_scheduled_tokens)
        return msgspec.structs.replace(scheduled, masks=masks) if masks else scheduled, failed

    def advance(self, deltas: Iterable[RequestDelta]) -> dict[str, str]:
        """Take in a step's tokens. Returns the choices that can't go on, and why."""
        failed = {}
        for delta in deltas:
            reason = self.book.advance(delta.request_id, delta.new_token_ids) if delta.new_token_ids else None
            if reason is not None:
                failed[delta.request_id] = reason
        return failed


def vocabulary_of(tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """A tokenizer's tokens. Raises InvalidRequest where there is none."""
    if tokenizer is None:
        raise InvalidRequest("structured output needs a tokenizer, and this model has none", field=FIELD)
    return Vocabulary(
        token_bytes=[tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)],
        special_ids=tokenizer.special_ids,
        eos_ids=tuple(token_id for token_id in eos_token_ids if token_id < tokenizer.vocab_size),
        bos_id=tokenizer.bos_token_id,
        encode=partial(tokenizer.encode, add_special_tokens=False),
    )


def _read_vocabulary(config: EngineConfig) -> Vocabulary:
    with open_model(config) as checkpoint:
        text = read_text_side(config, checkpoint)
    return vocabulary_of(text.tokenizer, text.eos_token_ids)
