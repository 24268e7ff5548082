"""Embeddings equal Hugging Face's rows under sentence-transformers' rule."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.base.errors import CheckpointError, ConfigError, InvalidRequest
from octavo.core.base.pooling import PoolingParams
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.llm import LLM
from tests.engine.vectors import OPTIONS, WIDTH, close, pooled, save, texts_of, unit, write_tokenizer
from tests.fakes import tiny_encoders, tiny_models
from tests.pool.directories import compact, dense_config, flags, save_dense, write_modules


@pytest.mark.parametrize("form", [flags, compact], ids=["booleans", "compact"])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_pooling_read_from_either_form(family: str, mode: str, form: Any, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder(family) if family == "bert" else tiny_encoders.make_stack(family)
    write_modules(save(model, tmp_path), form(mode, WIDTH))
    texts = texts_of(model)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for text, output in zip(texts, llm.embed(texts), strict=True):
            close(output.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, text), mode)))
            assert output.outputs.hidden_size == WIDTH
            assert output.prompt_token_ids == text
            assert output.finished


def test_dimensions_are_cut_first_and_then_normalised(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    text = texts_of(model)[0]
    row = pooled(tiny_encoders.rows_of(model, text), "mean")
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (output,) = llm.embed(text, dimensions=5)
        close(output.outputs.embedding, unit(row[:5]))
        assert torch.tensor(output.outputs.embedding).norm().item() == pytest.approx(1.0, abs=1e-6)
        close(llm.embed(text, dimensions=5, normalize=False)[0].outputs.embedding, row[:5])
        close(llm.encode(text, PoolingParams(normalize=False))[0].outputs.data, row)
        for wrong in (0, -1, 49, 2.5, True):
            with pytest.raises(InvalidRequest) as caught:
                llm.embed(text, dimensions=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "dimensions"


def test_dimensions_that_the_model_was_trained_for(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert", matryoshka_dimensions=[8, 16])
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.embed([5], dimensions=16)[0].outputs.hidden_size == 16
        with pytest.raises(InvalidRequest, match="trained for 8, 16"):
            llm.embed([5], dimensions=9)


def test_dense_modules(tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    torch.manual_seed(0)
    first, second = torch.nn.Linear(WIDTH, 96), torch.nn.Linear(96, 24)
    write_modules(
        save(model, tmp_path),
        compact("mean", WIDTH),
        dense=(dense_config(WIDTH, 96), dense_config(96, 24, "linear.Identity")),
    )
    save_dense(tmp_path / "2_Dense", first)
    save_dense(tmp_path / "3_Dense", second)
    texts = texts_of(model)
    with LLM(str(tmp_path), **OPTIONS) as llm, torch.no_grad():
        for text, output in zip(texts, llm.embed(texts, dimensions=10), strict=True):
            row = pooled(tiny_encoders.rows_of(model, text), "mean")
            close(output.outputs.embedding, unit(second(torch.tanh(first(row)))[:10]))


def test_any_decoder_by_the_users_word(tmp_path: Path) -> None:
    model = tiny_models.make_llama()
    save(model, tmp_path)
    texts = texts_of(model)
    with LLM(str(tmp_path), pooling="last", **OPTIONS) as llm, torch.no_grad():
        for text, output in zip(texts, llm.embed(texts), strict=True):
            rows = model.model(torch.tensor([text])).last_hidden_state[0]  # type: ignore[operator,union-attr]
            close(output.outputs.embedding, unit(rows[-1]))


@pytest.mark.parametrize(
    ("prefix", "family"), [("bert.", "bert"), ("model.", "llama"), ("language_model.model.", "llama")]
)
def test_files_of_a_whole_model_under_a_bare_name(prefix: str, family: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder(family) if family == "bert" else tiny_encoders.make_stack(family)
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    weights = {prefix + name: value for name, value in load_file(tmp_path / "model.safetensors").items()}
    save_file(weights | {"lm_head.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors")
    text = texts_of(model)[0]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        close(llm.embed(text)[0].outputs.embedding, unit(tiny_encoders.rows_of(model, text).mean(0)))


def test_bare_stacks_need_a_word(tmp_path: Path) -> None:
    save(tiny_encoders.make_stack("llama"), tmp_path)
    with pytest.raises(CheckpointError, match="how they become one vector") as caught:
        LLM(str(tmp_path), **OPTIONS)
    assert caught.value.field == "pooling"
    with pytest.raises(ConfigError) as wrong:
        LLM(str(tmp_path), pooling="average", **OPTIONS)
    assert wrong.value.field == "pooling"


def test_texts_and_prompts(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    write_modules(
        save(model, tmp_path),
        {"pooling_mode": "mean", "include_prompt": False},
        whole={"prompts": {"query": "query: ", "document": "text: "}, "default_prompt_name": "document"},
        sentence={"do_lower_case": True, "max_seq_length": 40},
    )
    write_tokenizer(tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.max_model_len == 40
        (plain,) = llm.embed("W1 w2")
        assert plain.prompt_token_ids == [1, 65, 5, 6, 2]  # the default prompt, and lower case
        rows = tiny_encoders.rows_of(model, plain.prompt_token_ids)
        close(plain.outputs.embedding, unit(rows[2:].mean(0)))  # [CLS] and the prompt are left out
        (query,) = llm.embed("w1 w2", prompt_name="query")
        assert query.prompt_token_ids == [1, 64, 5, 6, 2]
        for prompts, name in (("w1", "passage"), ([5], "query")):
            with pytest.raises(InvalidRequest) as caught:
                llm.embed(prompts, prompt_name=name)  # type: ignore[arg-type]
            assert caught.value.field == "prompt_name"
        with pytest.raises(InvalidRequest, match="41 tokens, above max_model_len 40"):
            llm.embed(" ".join(["w1"] * 38))
        scores = llm.score("w1 w2", ["w1 w2", "w3"])
        document = unit(tiny_encoders.rows_of(model, [1, 65, 7, 2])[2:].mean(0))
        asked = unit(tiny_encoders.rows_of(model, [1, 64, 5, 6, 2])[2:].mean(0))
        assert scores[1].outputs.score == pytest.approx(float(asked @ document), abs=1e-4)
        assert scores[1].prompt_token_ids == [1, 64, 5, 6, 2, 1, 65, 7, 2]


def test_nothing_but_a_prompt_that_does_not_count(tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    write_modules(
        save(model, tmp_path),
        {"pooling_mode": "mean", "include_prompt": False},
        whole={"prompts": {"query": "query: "}, "default_prompt_name": "query"},
    )
    write_tokenizer(tmp_path, around=False)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        (output,) = llm.embed("w1 w2")
        assert output.prompt_token_ids == [64, 5, 6]
        close(output.outputs.embedding, unit(tiny_encoders.rows_of(model, [64, 5, 6])[1:].mean(0)))
        with pytest.raises(InvalidRequest, match="empty but for its prompt"):
            llm.embed("")


def test_similarity_by_dot_product(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    save(model, tmp_path)
    write_tokenizer(tmp_path)
    rows = [tiny_encoders.rows_of(model, [1, token, 2]).mean(0) for token in (5, 6)]
    for name, expected in (("dot", rows[0] @ rows[1]), ("cosine", unit(rows[0]) @ unit(rows[1])), ("manhattan", None)):
        write_modules(tmp_path, compact("mean", WIDTH), normalize=False, whole={"similarity_fn_name": name})
        with LLM(str(tmp_path), **OPTIONS) as llm:
            if expected is None:
                with pytest.raises(InvalidRequest, match="not implemented"):
                    llm.score("w1", "w2")
            else:
                assert llm.score("w1", "w2")[0].outputs.score == pytest.approx(float(expected), rel=1e-4)


def test_a_gguf_by_the_users_word() -> None:
    with LLM("smollm2", pooling="last", max_model_len=64, **(OPTIONS | {"num_kv_blocks": 64})) as llm:
        scores = [each.outputs.score for each in llm.score("bread", ["bread", "the parliament of Norway"])]
        assert scores[0] == pytest.approx(1.0, abs=1e-5)
        assert scores[1] < 0.99


@pytest.fixture(scope="module")
def minilm() -> Iterator[LLM]:
    with LLM("minilm", **OPTIONS) as llm:
        yield llm


def test_minilm_equals_hugging_face(minilm: LLM) -> None:
    from transformers import AutoModel, AutoTokenizer

    from octavo.core.load.demos import locate_demo

    texts = [
        "How do I bake bread?",
        "A recipe for sourdough loaves.",
        "The stock market fell today. " * 20,
        "déjà vu, NAÏVE café — 北京 и Москва!",
        "",
    ]
    folder = str(locate_demo("minilm"))
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    for text, output in zip(texts, minilm.embed(texts), strict=True):
        encoded = tokenizer(text, return_tensors="pt")
        assert output.prompt_token_ids == encoded.input_ids[0].tolist()
        with torch.no_grad():
            expected = unit(model(**encoded).last_hidden_state[0].mean(0))
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), expected, rtol=0, atol=2e-6)


def test_minilm_finds_what_belongs_together(minilm: LLM) -> None:
    documents = ["A recipe for sourdough loaves.", "The stock market fell today.", "Cats sleep all day."]
    scores = [each.outputs.score for each in minilm.score("How do I bake bread?", documents)]
    assert max(scores) == scores[0] > 0.5
    assert minilm.max_model_len == 256


def test_the_same_over_a_process(minilm: LLM) -> None:
    texts = ["How do I bake bread?", [101, 2129, 102], "A recipe."]

    async def ask() -> None:
        async with AsyncEngine("minilm", **OPTIONS) as engine:
            several = await asyncio.gather(*(engine.embed(texts, dimensions=dimensions) for dimensions in (None, 7)))
            for dimensions, outputs in zip((None, 7), several, strict=True):
                expected = minilm.embed(texts, dimensions=dimensions)
                assert [o.outputs for o in outputs] == [o.outputs for o in expected]
            scores = await engine.score("bread", ["dough", "cats"])
            assert [o.outputs for o in scores] == [o.outputs for o in minilm.score("bread", ["dough", "cats"])]
            for refused in (engine.classify("a"), engine.embed("a", dimensions=400), engine.complete("a")):
                with pytest.raises(InvalidRequest):
                    await refused
            with pytest.raises(InvalidRequest, match="above max_model_len"):
                await engine.embed([5] * 257)
            assert (await engine.encode("a"))[0].outputs.data == minilm.encode("a")[0].outputs.data
            assert dataclasses.astuple(engine.stats())[:2] == (0, 0)

    asyncio.run(ask())
