"""The two real tokenizers, and small ones made on the spot."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from octavo.core.load.gguf import GGUFCheckpoint
from octavo.core.load.resolve import resolve_model
from octavo.core.text.byte_table import byte_alphabet
from octavo.core.text.loader import load_tokenizer
from octavo.core.text.tokenizer import Tokenizer


def _metadata(name):
    checkpoint = GGUFCheckpoint(resolve_model(name).path)
    try:
        return dict(checkpoint.metadata)
    finally:
        checkpoint.close()


def _hugging_face(name):
    transformers = pytest.importorskip("transformers")
    path = resolve_model(name).path
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="session")
def smollm2_metadata():
    return _metadata("smollm2")


@pytest.fixture(scope="session")
def gemma_metadata():
    return _metadata("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata):
    return load_tokenizer({}, smollm2_metadata)


@pytest.fixture(scope="session")
def gemma(gemma_metadata):
    return load_tokenizer({}, gemma_metadata)


@pytest.fixture(scope="session")
def hf_smollm2():
    return _hugging_face("smollm2")


@pytest.fixture(scope="session")
def hf_gemma():
    return _hugging_face("gemma3-270m")


@pytest.fixture(scope="session")
def byte_gguf():
    """GGUF metadata of a byte-level vocabulary: the bytes, digits up to 1234, and two special tokens."""
    tokens = [*byte_alphabet(), "12", "123", "1234", "<s>", "</s>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


@pytest.fixture(scope="session")
def llama_gguf():
    """GGUF metadata of a sentencepiece vocabulary with byte fallback, like Llama 2's."""
    pieces = ["▁", "h", "i", "t", "e", "hi", "▁hi", "th", "the", "▁the", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def spaced():
    """A tokenizer that puts a space before every text, and takes it off when decoding."""
    merges = [("▁", "h"), ("▁h", "i"), ("▁", "y"), ("▁y", "o"), ("▁yo", "u")]
    letters = ["▁", "h", "i", "y", "o", "u", *("".join(pair) for pair in merges)]
    vocab = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(vocab)}, merges, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, eos_token_ids=(1,))


@pytest.fixture(scope="session")
def words():
    """A whitespace word-level tokenizer without a decoder."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "there": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokenizer(backend, special_tokens={}, eos_token_ids=())
