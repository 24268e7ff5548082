"""BERT's word pieces from GGUF keys equal the tokenizer that ships with a real encoder."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers

from octavo.core.base.errors import CheckpointError, ModelNotFound
from octavo.core.load.resolve import resolve_model
from octavo.core.text.gguf_vocab import tokenizer_from_gguf

BASE = "tokenizer.ggml."
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "play", "##ing", "a", "##b", ",", "##c"]
TEXTS = ["playing a game, NAÏVELY!", "a ab abc", "", "unaffordable 汉字 co-operate 3.14", "  spaces\tand\nlines "]


def stored(words: list[str], **changes: Any) -> dict[str, Any]:
    """The keys of a vocabulary as a converter writes them."""
    special = [word.startswith("[") and word[1:-1].isupper() for word in words]
    tokens = [
        word if is_special else word.removeprefix("##") if word.startswith("##") else f"▁{word}"
        for word, is_special in zip(words, special, strict=True)
    ]
    keys = {
        "model": "bert",
        "pre": "jina-v2-en",
        "tokens": tokens,
        "token_type": [3 if is_special else 1 for is_special in special],
        "unknown_token_id": words.index("[UNK]"),
        "cls_token_id": words.index("[CLS]"),
        "seperator_token_id": words.index("[SEP]"),
        "padding_token_id": words.index("[PAD]"),
        **changes,
    }
    return {BASE + key: value for key, value in keys.items() if value is not None}


def test_pieces_of_words_and_ends() -> None:
    tokenizer = tokenizer_from_gguf(stored(WORDS))
    ids = tokenizer.encode("Playing abc, x")
    assert [WORDS[i] for i in ids] == ["[CLS]", "play", "##ing", "a", "##b", "##c", ",", "[UNK]", "[SEP]"]
    assert [WORDS[i] for i in tokenizer.encode("a", add_special_tokens=False)] == ["a"]


def test_a_vocabulary_with_capitals_keeps_them() -> None:
    tokenizer = tokenizer_from_gguf(stored([*WORDS, "Play"]))
    assert [[*WORDS, "Play"][i] for i in tokenizer.encode("Playing")] == ["[CLS]", "Play", "##ing", "[SEP]"]


def test_older_files_name_the_ends_otherwise() -> None:
    older = stored(WORDS, cls_token_id=None, seperator_token_id=None, bos_token_id=2, eos_token_id=3)
    assert tokenizer_from_gguf(older).encode("a") == [2, 7, 3]
    with pytest.raises(CheckpointError, match=r"no tokenizer\.ggml\.cls_token_id"):
        tokenizer_from_gguf(stored(WORDS, cls_token_id=None))


def test_a_real_vocabulary_cuts_as_its_own_tokenizer() -> None:
    try:
        path = resolve_model("minilm").path
    except ModelNotFound as error:
        pytest.skip(str(error))
    own = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    own.no_truncation()
    own.no_padding()
    vocab = own.get_vocab()
    tokenizer = tokenizer_from_gguf(stored(sorted(vocab, key=vocab.__getitem__)))
    for text in TEXTS:
        assert tokenizer.encode(text) == own.encode(text).ids, text
