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
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
"""Letters that have a case, as DeepSeek's first tokenizers list them: those of one version of Unicode."""
_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"


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
    (
        PreTokenizer((_GPT2,)),
        "default gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat roberta-bpe jina-v1-en "
        "jina-v2-code jina-v2-de jina-v2-es jina-de jina-es a.x-4.0 mellum",
    ),
    (PreTokenizer((r"\p{N}", _GPT2)), "smollm starcoder refact codeshell exaone minerva-7b"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True), "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral"),
    (PreTokenizer((r"\p{N}", _GPT2), nfc=True, add_bos=True), "command-r"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (PreTokenizer((_QWEN2,), nfc=True), "qwen2 deepseek-r1-qwen megrez kormo"),
    (PreTokenizer((_QWEN2,)), "stablelm2 hunyuan"),
    (PreTokenizer((_QWEN35,), nfc=True), "qwen35"),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4"),
    (PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3), add_bos=True), "deepseek-v3"),
    (PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3)), "hunyuan-dense"),
    (
        PreTokenizer((r"[\r\n]", rf"\s?[{_CASED}]+", _MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+"), add_bos=True),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"), add_bos=True),
        "deepseek-coder",
    ),
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {name: pre_tokenizer for pre_tokenizer, names in _FAMILIES for name in names.split()}
)
"""`tokenizer.ggml.pre` -> how to cut text."""
