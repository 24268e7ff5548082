"""Encoding and decoding equal Hugging Face's on both real files."""

import copy
import itertools
import random
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from octavo.core.base.errors import CheckpointError, InvalidRequest
from octavo.core.text.tokenizer import Tokenizer

CORPUS = (
    "", " ", "  ", "\n", "\r\n", "\t\t", "a", " a", "The capital of France is", "don't I'LL they'Ve 's",
    "  two  spaces   three ", "\n\n\n1. list\n\t- item\r\n\r\n", "x = [1, 2.5e-3]; y ** 2 != z  # done",
    "0123456789 1 22 333", "日本語のテキスト。", "中文，没有空格", "한국어 문장", "Привет, мир!", "Γειά σου Κόσμε",
    "مرحبا بالعالم ٣٤", "שלום עולם", "नमस्ते दुनिया", "ไทยไม่มีช่องว่าง", "Zażółć gęślą jaźń", "naïve café — “quoted” …",
    "e\u0301 vs \u00e9", "😀 👩\u200d👩\u200d👧 🏳️\u200d🌈 🇫🇷", "𝒳𝔸 𐍈 ＡＢＣ", "²³ ¼ Ⅷ ①",
    "\u00a0\u2003\u200b\ufeff", "\x00\x01\x7f\x85", "\ufffd \uffff \U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>", "<bos>hi<eos> <pad> <unused94> [multimodal]",
    "<table><tr></h1>\t\n\n", "▁ ▁▁ Ġ Ċ", "<0x0A> <0xE2>", "a" * 300, "ab " * 100, " " * 100, "ď" * 20,
    "exaggerated exaggerated described",
)  # fmt: skip
PIECES = st.sampled_from([piece for piece in CORPUS if 0 < len(piece) < 30])
MIXED = st.one_of(st.text(max_size=40), st.lists(st.one_of(PIECES, st.text(max_size=5)), max_size=6).map("".join))


def assert_same(ours, theirs, text):
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, special) == ids
        assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)


@pytest.fixture(scope="session")
def published_smollm2(hf_smollm2):
    """Hugging Face's tokenizer with the cutting that SmolLM2 was trained with.

    Its GGUF conversion leaves out that digits stand alone (`tokenizer.ggml.pre` = smollm), which shows next to
    white space: "\\n\\n1".
    """
    published = copy.deepcopy(hf_smollm2)
    published.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return published


def test_smollm2_equals_hugging_face(smollm2, published_smollm2):
    for text in (*CORPUS, *map("".join, itertools.pairwise(CORPUS))):
        assert_same(smollm2, published_smollm2, text)


@given(text=MIXED.filter(lambda text: not any(char.isnumeric() for char in text)))
def test_any_text_without_digits_equals_the_conversion_too(smollm2, hf_smollm2, text):
    assert_same(smollm2, hf_smollm2, text)


def test_gemma_equals_hugging_face(gemma, hf_gemma):
    for text in (*CORPUS, *map("".join, itertools.pairwise(CORPUS))):
        assert_same(gemma, hf_gemma, text)


@given(text=MIXED)
@example(text="\n\n1")
def test_any_text_smollm2(smollm2, published_smollm2, text):
    assert_same(smollm2, published_smollm2, text)


@given(text=MIXED)
def test_any_text_gemma(gemma, hf_gemma, text):
    assert_same(gemma, hf_gemma, text)


@given(text=st.text(max_size=60))
def test_decoding_gives_the_text_back(gemma, text):
    assert gemma.decode(gemma.encode(text, add_special_tokens=False)) == text


def test_decoding_any_ids_equals_the_library_for_byte_level(smollm2, hf_smollm2):
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(smollm2.vocab_size) for _ in range(rng.randrange(12))]
        assert smollm2.decode(ids, False) == hf_smollm2.decode(ids, skip_special_tokens=False)


def test_facts_of_the_real_models(smollm2, gemma):
    assert (smollm2.vocab_size, smollm2.eos_token_ids, smollm2.bos_token_id, smollm2.adds_bos) == (
        49152,
        (2,),
        1,
        False,
    )
    assert (gemma.vocab_size, gemma.eos_token_ids, gemma.bos_token_id, gemma.adds_bos) == (262144, (1,), 2, True)
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smollm2.encode("") == []
    assert smollm2.chat_template is not None
    assert gemma.chat_template is None
    assert {0, 1, 2} <= smollm2.special_ids
    assert sum("\ufffd" in smollm2.token_text(i) for i in range(49152)) == 314


def test_token_bytes_are_exact(smollm2, gemma, spaced):
    assert [smollm2.token_bytes(i) for i in (143, 233)] == [b"\xc4", b"\x8f"]
    assert b"".join(map(smollm2.token_bytes, [10813, 242, 218])).decode() == "😀"
    assert smollm2.token_bytes(24098) == b" exaggerated"
    assert smollm2.token_bytes(1) == b"<|im_start|>"
    assert gemma.token_bytes(gemma.token_id("<0xE2>")) == b"\xe2"
    assert gemma.token_bytes(gemma.token_id("▁the")) == b" the"
    assert spaced.token_bytes(spaced.token_id("▁hi")) == b" hi"


def test_ids_outside_the_vocabulary_stand_for_nothing(smollm2):
    assert smollm2.token_bytes(10**6) == b""
    assert smollm2.decode([504, 10**6]) == "The"


def test_the_space_put_before_a_text_is_taken_off(spaced, words):
    ids = spaced.encode("hi you")
    assert [spaced.token_bytes(i) for i in ids] == [b"<s>", b" hi", b" you"]
    assert spaced.decode(ids) == "hi you"
    assert spaced.decode(ids, skip_special_tokens=False) == "<s> hi you"
    assert words.decode(words.encode("hello there")) == "hello there"


def test_no_clean_up_of_spaces(smollm2):
    text = "He said 'hi' , and left . do n't ?"
    assert smollm2.decode(smollm2.encode(text)) == text


def test_lone_surrogates_are_the_requests_fault(smollm2):
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("ab\ud800")


def test_a_truncation_in_the_file_cuts_no_prompt():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(2)
    assert Tokenizer(backend, special_tokens={}, eos_token_ids=()).encode("a a a a") == [0] * 4


def test_a_decoder_that_is_not_per_token_is_refused():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.CTC()
    with pytest.raises(CheckpointError, match="decoder uses CTC"):
        Tokenizer(backend, special_tokens={}, eos_token_ids=())


def test_word_pieces_decode_to_words():
    pieces = {"[UNK]": 0, "play": 1, "##ing": 2, "card": 3, "##s": 4, "[CLS]": 5}
    backend = tokenizers.Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    tokenizer = Tokenizer(backend, special_tokens={"cls_token": "[CLS]"}, eos_token_ids=())
    ids = tokenizer.encode("playing cards")
    assert ids == [1, 2, 3, 4]
    assert tokenizer.decode([5, *ids]) == "playing cards"
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" play", b"ing", b" card", b"s"]


def test_pairs_of_texts():
    vocab = {"[CLS]": 0, "[SEP]": 1, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    assert plain.encode_pair("a b", "b") == ([2, 3, 3], 2)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    tokenizer = Tokenizer(backend, special_tokens={}, eos_token_ids=())
    assert tokenizer.encode_pair("a b", "b") == ([0, 2, 3, 1, 3, 1], 4)
    assert tokenizer.encode_pair("", "") == ([0, 1, 1], 2)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    untold = Tokenizer(backend, special_tokens={}, eos_token_ids=())  # as RoBERTa's, which has one type
    assert untold.encode_pair("a", "b") == ([0, 2, 1, 1, 3, 1], 6)
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        tokenizer.encode_pair("a", "\ud800")


def test_transformers_is_not_imported(smollm2_metadata):
    code = (
        "import sys; from octavo.core.text.loader import load_tokenizer; "
        "from octavo.core.load.gguf import GGUFCheckpoint; from octavo.core.load.resolve import resolve_model; "
        "load_tokenizer({}, GGUFCheckpoint(resolve_model('smollm2').path).metadata).encode('hi'); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"}, check=False).returncode == 0
