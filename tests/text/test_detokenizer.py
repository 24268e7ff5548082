"""Streamed text equals the full decode, whatever the ids and the cuts."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.base.params import SamplingParams
from octavo.core.text.detokenizer import Detokenizer, hidden_ids


def stream(tokenizer, ids, cuts=None, **options):
    """Deltas of ids pushed in pieces of the given lengths (one by one by default)."""
    detokenizer = Detokenizer(tokenizer, **options)
    cuts, start, deltas = list(cuts or [1] * len(ids)), 0, []
    while start < len(ids):
        count = cuts.pop() if cuts else 1
        deltas.append(detokenizer.push(ids[start : start + count]))
        start += count
    return [*deltas, detokenizer.flush()]


@pytest.mark.parametrize(("ids", "deltas"), [([143, 233], ["", "ď"]), ([10813, 242, 218], ["", "", "😀"])])
def test_a_character_over_several_tokens_comes_whole(smollm2, ids, deltas):
    assert stream(smollm2, ids) == [*deltas, ""]


def test_a_character_cut_short_is_one_replacement_at_the_end(smollm2):
    assert stream(smollm2, [35542, 10813, 242]) == ["ABC", "", "", "\ufffd"]
    assert smollm2.decode([35542, 10813, 242]) == "ABC\ufffd"


def test_space_led_words_keep_their_space(gemma, spaced):
    assert stream(gemma, gemma.encode(" the cat", add_special_tokens=False)) == [" the", " cat", ""]
    ids = [spaced.token_id("▁hi"), spaced.token_id("▁you")]
    assert stream(spaced, ids) == ["hi", " you", ""]
    assert stream(spaced, ids, continuation=True) == [" hi", " you", ""]


def test_special_tokens_are_left_out_or_shown(smollm2):
    ids = [1, 35542, 2]
    assert "".join(stream(smollm2, ids)) == "ABC"
    assert "".join(stream(smollm2, ids, hidden_ids=frozenset())) == "<|im_start|>ABC<|im_end|>"


def test_some_special_tokens_may_stay(smollm2):
    params = SamplingParams(visible_special_token_ids=[1])
    assert "".join(stream(smollm2, [1, 35542, 2], hidden_ids=hidden_ids(smollm2, params))) == "<|im_start|>ABC"
    assert hidden_ids(smollm2, params.with_(skip_special_tokens=False)) == frozenset()
    assert hidden_ids(smollm2, SamplingParams()) == smollm2.special_ids


@given(data=st.data())
@pytest.mark.parametrize("name", ["smollm2", "gemma", "spaced"])
def test_any_ids_in_any_pieces(request, name, data):
    tokenizer = request.getfixturevalue(name)
    parts = st.integers(0, min(600, tokenizer.vocab_size - 1))  # where the bytes and special tokens are
    ids = data.draw(st.lists(parts, max_size=20))
    cuts = data.draw(st.lists(st.integers(1, 4), max_size=20))
    for skip in (True, False):
        deltas = stream(tokenizer, ids, cuts, hidden_ids=None if skip else frozenset())
        assert "".join(deltas) == tokenizer.decode(ids, skip)


def test_500_sequences_of_invalid_tokens_eight_at_once(smollm2, hf_smollm2):
    """Case A2: nothing raises, each choice has its own text, and streamed text equals Hugging Face's full decode."""
    rng = random.Random(0)
    invalid = [i for i in range(smollm2.vocab_size) if "\ufffd" in smollm2.token_text(i)]
    assert len(invalid) == 314
    for _ in range(0, 500, 8):
        sequences = [
            [rng.choice(invalid) if rng.random() < 0.8 else rng.randrange(smollm2.vocab_size) for _ in range(30)]
            for _ in range(8)
        ]
        detokenizers = [Detokenizer(smollm2, hidden_ids=frozenset()) for _ in sequences]
        texts = [""] * 8
        for step in range(30):
            for i, detokenizer in enumerate(detokenizers):
                texts[i] += detokenizer.push([sequences[i][step]])
        texts = [text + detokenizer.flush() for text, detokenizer in zip(texts, detokenizers, strict=True)]
        assert texts == [hf_smollm2.decode(ids, skip_special_tokens=False) for ids in sequences]


def test_deltas_never_end_inside_a_character(smollm2):
    text = "naïve 😀 日本語 👩\u200d👩\u200d👧 ď"
    assert not any("\ufffd" in delta for delta in stream(smollm2, smollm2.encode(text)))


def test_bytes_of_tokens_join_to_the_text(smollm2, gemma):
    text = "He said: “😀 ď” — the end"
    for tokenizer in (smollm2, gemma):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_time_is_linear(smollm2):
    """Twenty times the tokens take far less than the 400-fold time of a quadratic decoder."""
    ids = [218, 504, 10813] * 1000

    def seconds(count):
        detokenizer = Detokenizer(smollm2)
        start = time.thread_time()
        for token_id in ids * count:
            detokenizer.push((token_id,))
        return time.thread_time() - start

    seconds(1)
    assert seconds(20) < 100 * min(seconds(1) for _ in range(5))
