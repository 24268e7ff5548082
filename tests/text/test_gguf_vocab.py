"""Tokenizers from GGUF metadata: what the keys mean, and clear errors."""

import time

import pytest

from octavo.core.base.errors import CheckpointError
from octavo.core.text.gguf_vocab import tokenizer_from_gguf
from octavo.core.text.loader import load_tokenizer

BASE = "tokenizer.ggml."


def texts(tokenizer, text):
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234"]),
        ("default", ["1234"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-4o", ["123", "4"]),
        ("tekken", ["1", "2", "3", "4"]),
    ],
)
def test_the_pre_tokenizer_cuts_text_before_merging(byte_gguf, pre, pieces):
    tokenizer = tokenizer_from_gguf(byte_gguf | {BASE + "pre": pre})
    assert texts(tokenizer, "1234") == pieces


def test_no_pre_tokenizer_means_gpt2(byte_gguf):
    without = {key: value for key, value in byte_gguf.items() if key != BASE + "pre"}
    assert texts(tokenizer_from_gguf(without), "1234") == ["1234"]


def test_families_that_normalise_do(byte_gguf):
    assert (
        tokenizer_from_gguf(byte_gguf | {BASE + "pre": "qwen2"}).decode(
            tokenizer_from_gguf(byte_gguf | {BASE + "pre": "qwen2"}).encode("e\u0301")
        )
        == "\u00e9"
    )


def test_bos_and_eos_are_added_as_the_file_says(byte_gguf):
    bos, eos = byte_gguf[BASE + "bos_token_id"], byte_gguf[BASE + "eos_token_id"]
    one = tokenizer_from_gguf(byte_gguf).encode("1")
    assert len(one) == 1
    added = byte_gguf | {BASE + "add_bos_token": True, BASE + "add_eos_token": True}
    assert tokenizer_from_gguf(added).encode("1") == [bos, *one, eos]
    assert tokenizer_from_gguf(added).adds_bos
    assert tokenizer_from_gguf(byte_gguf | {BASE + "pre": "llama-bpe"}).encode("1") == [bos, *one]


def test_all_ids_that_end_a_turn_are_eos(byte_gguf):
    tokenizer = tokenizer_from_gguf(byte_gguf | {BASE + "eot_token_id": 5, BASE + "eom_token_id": 10**6})
    assert tokenizer.eos_token_ids == (byte_gguf[BASE + "eos_token_id"], 5)


def test_a_file_may_hold_a_template_for_tools_besides(byte_gguf):
    keys = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = tokenizer_from_gguf(byte_gguf | keys)
    assert (tokenizer.chat_template, tokenizer.tool_chat_template) == ("plain", "tools")
    assert tokenizer_from_gguf(byte_gguf).tool_chat_template is None


def test_control_tokens_are_found_in_text_and_user_defined_ones_are_shown(byte_gguf):
    types = list(byte_gguf[BASE + "token_type"])
    types[-1] = 4
    tokenizer = tokenizer_from_gguf(byte_gguf | {BASE + "token_type": types, BASE + "eos_token_id": 0})
    assert texts(tokenizer, "1<s>2</s>") == ["1", "<s>", "2", "</s>"]
    assert tokenizer.decode(tokenizer.encode("1<s>2</s>")) == "12</s>"


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(llama_gguf):
    tokenizer = tokenizer_from_gguf(llama_gguf)
    assert tokenizer.encode("hi") == [1, tokenizer.token_id("▁hi")]
    assert texts(tokenizer, "hi  the") == [" hi", " ", " the"]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("hé")[1:]] == [b" ", b"h", b"\xc3", b"\xa9"]
    for text in ("hi", " hi", "  hi", "hé the", "😀", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)).lstrip(" ") == text.lstrip(" ")
    assert tokenizer.decode(tokenizer.encode("hi the")) == "hi the"


def test_sentencepiece_without_space_prefix(llama_gguf):
    tokenizer = tokenizer_from_gguf(llama_gguf | {BASE + "add_space_prefix": False})
    assert texts(tokenizer, "hi hi") == ["hi", " hi"]
    assert not tokenizer.strips_leading_space
    assert tokenizer.decode(tokenizer.encode("  hi")) == "  hi"


def test_numpy_lists_are_taken_too(llama_gguf):
    import numpy as np

    arrays = {key: np.array(llama_gguf[BASE + key]) for key in ("token_type", "scores")}
    as_arrays = llama_gguf | {BASE + key: value for key, value in arrays.items()}
    assert tokenizer_from_gguf(as_arrays).encode("hi the") == tokenizer_from_gguf(llama_gguf).encode("hi the")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"pre": "brand-new"}, "tokenizer.ggml.pre is 'brand-new', which Octavo doesn't know"),
        ({"token_type": [1]}, "token_type has 1 entries for"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": ["zz top"]}, "inconsistent"),
        ({"merges": ["a b c"]}, "merges holds 'a b c', no pair"),
        ({"merges": [1, 2]}, "merges is .* no list of strings"),
        ({"tokens": 7}, "tokens is '7', no list of strings"),
        ({"tokens": [1, 2]}, "no list of strings"),
        ({"token_type": 1.5}, "token_type is '1.5', no list of integers"),
        ({"token_type": ["a"]}, "no list of integers"),
        ({"pre": ["gpt-2"]}, "tokenizer.ggml.pre is"),
        ({"bos_token_id": "1"}, "bos_token_id is '1', no token id"),
        ({"eos_token_id": 1.5}, "eos_token_id is '1.5', no token id"),
    ],
)
def test_errors_name_the_key(byte_gguf, change, message):
    metadata = byte_gguf | {BASE + key: value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message) as caught:
        tokenizer_from_gguf({key: value for key, value in metadata.items() if value is not None})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (1.5, "no list of floats"),
        (["a"], "no list of floats"),
        ([1.5], "scores has 1 entries for"),
        (lambda scores: [*scores[:-1], float("nan")], "scores holds a NaN"),
    ],
)
def test_scores_that_order_nothing(llama_gguf, scores, message):
    changed = scores(llama_gguf[BASE + "scores"]) if callable(scores) else scores
    with pytest.raises(CheckpointError, match=message):
        tokenizer_from_gguf(llama_gguf | {BASE + "scores": changed})


def test_a_template_that_is_no_text(llama_gguf):
    with pytest.raises(CheckpointError, match=r"tokenizer.chat_template is .* no text"):
        tokenizer_from_gguf(llama_gguf | {"tokenizer.chat_template": ["{{ messages }}"]})


def test_a_token_twice_is_named(byte_gguf):
    tokens = [*byte_gguf[BASE + "tokens"][:-1], "123"]
    with pytest.raises(CheckpointError, match="holds '123' twice"):
        tokenizer_from_gguf(byte_gguf | {BASE + "tokens": tokens})


def test_building_is_quick(smollm2_metadata):
    """A process start waits for it: 0.2 s on a quiet machine. CPU time, since tests share the machine."""
    best = min(_cpu_seconds(lambda: load_tokenizer({}, smollm2_metadata)) for _ in range(5))
    assert best < 0.2


def _cpu_seconds(call):
    start = time.thread_time()
    call()
    return time.thread_time() - start
