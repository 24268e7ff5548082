"""Embedding models in GGUF files: text to vector with nothing but the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.core.base.errors import CheckpointError
from octavo.core.engine.llm import LLM
from tests.engine.vectors import OPTIONS, close, pooled, texts_of, unit
from tests.fakes import tiny_encoders
from tests.fakes.families import FAMILIES
from tests.fakes.gguf_files import write_gguf_file
from tests.text.test_word_pieces import WORDS, stored

VOCABULARY = [*WORDS, *(f"w{i}" for i in range(tiny_encoders.ENCODER["vocab_size"] - len(WORDS)))]


def test_an_encoder_with_its_word_pieces(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    path = write_gguf_file(model, "bert", tmp_path / "tiny.gguf", keys=stored(VOCABULARY))
    with LLM(str(path), **OPTIONS) as llm:
        for text in ("Playing, a w17 abc", "w3", ""):
            (output,) = llm.embed(text)
            ids = output.prompt_token_ids
            assert (VOCABULARY[ids[0]], VOCABULARY[ids[-1]]) == ("[CLS]", "[SEP]")
            close(output.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, ids), "mean")))
    with pytest.raises(CheckpointError, match="pools by mean, not by cls"):
        LLM(str(path), pooling="cls", **OPTIONS)


def test_a_decoder_whose_file_says_how_it_is_pooled(tmp_path: Path) -> None:
    model = FAMILIES["qwen3"].make()
    path = write_gguf_file(model, "qwen3", tmp_path / "tiny.gguf", keys={"qwen3.pooling_type": 3})
    with LLM(str(path), **OPTIONS) as llm:
        texts = texts_of(model)
        for text, output in zip(texts, llm.embed(texts), strict=True):
            rows = tiny_encoders.rows_of(model.model, text)  # type: ignore[arg-type]
            close(output.outputs.embedding, unit(pooled(rows, "lasttoken")))
