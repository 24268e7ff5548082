"""How byte-level BPE vocabularies cut text before merging, by the name a GGUF file gives in `tokenizer.ggml.pre`.

A file holds only the name. The expressions are those of each family's published tokenizer.json, in the syntax of the
`tokenizers` library; one name stands for the expressions, applied one after the other, and for the three settings
that the family's own tokenizer has and the file need not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|" + _CASED_TAIL
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"|\p{N}{1,3}|" + _CASED_TAIL
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family cuts text.

    Attributes:
        patterns: expressions applied in turn, each to the pieces that the one before left; matches stand alone.
        nfc: text is put into Unicode's NFC first.
        ignore_merges: a piece that is a token as it stands is taken whole.
        add_bos: whether BOS is added where the file does not say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_FAMILIES: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((_GPT2,)), "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4"),
    (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact codeshell exaone minerva-7b"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe"),
    (PreTokenizer((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen megrez"),
    (PreTokenizer((_QWEN2,)), "stablelm2 hunyuan"),
    (PreTokenizer((_QWEN35,), nfc=True), "qwen35"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4"),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: pre_tokenizer for pre_tokenizer, names in _FAMILIES for name in names.split()}
)
"""`tokenizer.ggml.pre` -> how to cut text."""
