"""How text is cut for each name of a pre-tokenizer: against the library's own parts, and by hand where it has none."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from octavo.core.text.pretokenizers import PRE_TOKENIZERS

TEXTS = [
    "Hello, world! It's 2024 and I'VE 12345 apples.",
    "  two  spaces\n\n\ttab\r\nline   ",
    "naïve Ünïcode Ελληνικά кириллица ქართული",
    "汉字かなカナ한국어 123四",
    "if x==1:\n    return {'a': [1, 2.5]} // comment\n",
    "e\u0301 😀🦙 ①② ½",
    "",
]
DIGITS = pre_tokenizers.Digits(individual_digits=True)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def pieces(pre_tokenizer: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    """The cut text, each piece by its place in the text, whatever the pre-tokenizer makes of its bytes."""
    return [text[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(text)]


def ours(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[name].patterns]
    )


@pytest.mark.parametrize("name", ["gpt-2", "phi-2", "olmo", "roberta-bpe"])
def test_names_of_gpt2s_words(name: str) -> None:
    for text in TEXTS:
        assert pieces(ours(name), text) == pieces(WORDS, text)


@pytest.mark.parametrize("name", ["smollm", "starcoder", "command-r", "refact"])
def test_names_of_single_digits_and_gpt2s_words(name: str) -> None:
    expected = pre_tokenizers.Sequence([DIGITS, WORDS])
    for text in TEXTS:
        assert pieces(ours(name), text) == pieces(expected, text)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama-bpe", "I'VE 12345 apples.\n\nAnd", ["I", "'VE", " ", "123", "45", " apples", ".\n\n", "And"]),
        ("glm4", "I'VE 12345 apples.\n\nAnd", ["I", "'VE", " ", "123", "45", " apples", ".\n\n", "And"]),
        ("chatglm-bpe", "(foo) 1234", ["(foo", ")", " ", "123", "4"]),
        ("qwen2", "I've 123 x", ["I", "'ve", " ", "1", "2", "3", " x"]),
        ("stablelm2", "I've 123 x", ["I", "'ve", " ", "1", "2", "3", " x"]),
        ("gpt-4o", "camelCase's 1234/\n", ["camel", "Case's", " ", "123", "4", "/\n"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("deepseek-v3", "a1234 汉字かな x+=1", ["a", "123", "4", " ", "汉字かな", " x", "+=", "1"]),
        ("deepseek-v3", "f(x).y $foo\n\n", ["f", "(x", ").", "y", " $", "foo", "\n\n"]),
        ("hunyuan-dense", "12345", ["123", "45"]),
        ("deepseek-coder", "foo(bar)\n12 汉字", ["foo", "(", "bar", ")", "\n", "1", "2", " ", "汉字"]),
        ("deepseek-llm", "foo bar1234!\nქა ", ["foo", " bar", "1234", "!", "\n", "ქა", " "]),
    ],
)
def test_cut_by_hand(name: str, text: str, expected: list[str]) -> None:
    found = pieces(ours(name), text)
    assert found == expected
    assert "".join(found) == text


def test_names_that_normalise_and_begin_with_bos() -> None:
    assert {name for name, pre in PRE_TOKENIZERS.items() if pre.nfc} >= {"qwen2", "command-r"}
    assert not any(PRE_TOKENIZERS[name].nfc for name in ("stablelm2", "llama-bpe", "deepseek-v3", "glm4"))
    assert all(PRE_TOKENIZERS[name].add_bos for name in ("llama-bpe", "command-r", "deepseek-v3", "deepseek-llm"))
    assert not any(PRE_TOKENIZERS[name].add_bos for name in ("qwen2", "gpt-2", "starcoder", "glm4", "gpt-4o"))


def test_every_expression_is_one_that_the_library_takes() -> None:
    for pre in PRE_TOKENIZERS.values():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC() if pre.nfc else None
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        for text in TEXTS:
            found = pieces(pre_tokenizers.Sequence(splits), text)
            assert "".join(found) == text, pre
