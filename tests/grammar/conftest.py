"""SmolLM2's vocabulary, and walks through grammars without a model."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from octavo.core.base.config import EngineConfig
from octavo.core.base.structured import StructuredOutput
from octavo.core.engine.grammars import vocabulary_of
from octavo.core.engine.loading import open_model, read_text_side
from octavo.core.grammar.compiler import GrammarCompiler
from octavo.core.text.tokenizer import Tokenizer

END = 2


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    config = EngineConfig(model="smollm2")
    with open_model(config) as checkpoint:
        text = read_text_side(config, checkpoint)
    assert text.tokenizer is not None
    assert text.eos_token_ids == (END,)
    return text.tokenizer


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: vocabulary_of(tokenizer, (END,)))


@pytest.fixture
def accepts(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Callable[[StructuredOutput, str], bool]:
    """Whether a text, whole, has a form."""

    def ask(structured: StructuredOutput, text: str) -> bool:
        compiler.check(structured, 10)
        state = compiler.start(structured).matcher.deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())

    return ask


@pytest.fixture
def walk(compiler: GrammarCompiler, tokenizer: Tokenizer) -> Callable[[StructuredOutput, int], str | None]:
    """The text of a random walk through a form's allowed tokens; None where it is not complete after 300 of them."""

    def go(structured: StructuredOutput, seed: int) -> str | None:
        compiler.check(structured, 10)
        state, rng, ids = compiler.start(structured).matcher.deep_copy(), random.Random(seed), []
        for _ in range(300):
            bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), dtype=np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            token_id = END if END in allowed and rng.random() < 0.5 else rng.choice(allowed)
            if token_id == END:
                return tokenizer.decode(ids)
            ids.append(token_id)
            assert state.consume_token(token_id)
        return None

    return go
