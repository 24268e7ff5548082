"""BERT's word pieces from a GGUF file's vocabulary.

    file       [CLS]   ▁play   ing
    here       [CLS]   play    ##ing

A file doesn't say whether text is put in lower case and loses its accents; a vocabulary without capitals says it.
Only `gguf_vocab.py` talks to this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

WORD_START = "▁"


def spelled(tokens: Sequence[str], normal: Collection[int]) -> list[str]:
    """The tokens as BERT's own vocabulary spells them; `normal` are the ids of those that are pieces of words."""
    return [_spelled(token) if i in normal else token for i, token in enumerate(tokens)]


def word_pieces(vocab: dict[str, int], unknown: str, normal: Collection[int]) -> tokenizers.Tokenizer:
    """The tokenizer of a vocabulary as `spelled` gives it."""
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    has_capitals = any(i in normal and any("A" <= char <= "Z" for char in token) for token, i in vocab.items())
    backend.normalizer = normalizers.BertNormalizer(lowercase=not has_capitals)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def enclosing(first: tuple[str, int], last: tuple[str, int]) -> processors.TemplateProcessing:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP] with the second text marked; each a token and its id."""
    return processors.TemplateProcessing(
        single=f"{first[0]} $A {last[0]}",
        pair=f"{first[0]} $A {last[0]} $B:1 {last[0]}:1",
        special_tokens=list(dict.fromkeys((first, last))),
    )


def _spelled(stored: str) -> str:
    return stored.removeprefix(WORD_START) if stored.startswith(WORD_START) else f"##{stored}"
