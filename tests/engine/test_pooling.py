"""Embeddings, classes and scores from the engine equal Hugging Face's, whatever the company and the chunks."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from octavo.backends.cpu.device import CpuBackend
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import CheckpointError, ConfigError, InvalidRequest, RequestFailed
from octavo.core.base.params import SamplingParams
from octavo.core.base.pooling import PoolingJob, PoolingParams
from octavo.core.engine.async_engine import AsyncEngine
from octavo.core.engine.llm import LLM
from octavo.core.engine.wire import EngineRequest
from tests.engine.worlds import engine_of
from tests.fakes import tiny_encoders, tiny_models
from tests.pool.directories import compact, dense_config, flags, save_dense, write_modules

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 2, "progress": False, "block_size": 4}
LENGTHS = (17, 1, 90, 5, 33)
WIDTH = 48


def pooled(rows_TM: torch.Tensor, mode: str) -> torch.Tensor:
    """Sentence-transformers' rule."""
    return {"mean": rows_TM.mean(0), "cls": rows_TM[0], "lasttoken": rows_TM[-1]}[mode]


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def texts_of(model: torch.nn.Module, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [tiny_encoders.random_text(model.config, length) for length in lengths]


def save(model: torch.nn.Module, path: Path) -> Path:
    tiny_models.save(model, path)
    return path


def close(found: list[float], expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def write_tokenizer(path: Path, *, around: bool = True) -> None:
    """Words w0, w1, …, `around` them [CLS] and [SEP]; in a pair the second text has type 1."""
    vocab = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3} | {f"w{i}": 4 + i for i in range(60)}
    vocab |= {"query:": 64, "text:": 65}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    backend.save(str(path / "tokenizer.json"))


# -- embeddings ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_chunks_and_company_change_nothing(mode: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    write_modules(save(model, tmp_path), compact(mode, WIDTH), normalize=False)
    texts = texts_of(model)
    found = []
    for tokens in (8, 64, 512):
        with LLM(str(tmp_path), max_num_batched_tokens=tokens, max_num_seqs=4, num_kv_blocks=200, **OPTIONS) as llm:
            found.append([output.outputs.embedding for output in llm.embed(texts)])
            assert [llm.embed(text)[0].outputs.embedding for text in texts] == found[-1]
            assert llm.stats().kv_blocks_used == 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_a_preempted_text_begins_again(mode: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    write_modules(save(model, tmp_path), compact(mode, WIDTH))
    low, high = texts_of(model, (61, 60))
    job = PoolingJob(needs_every_token=mode != "lasttoken", normalize=True)
    options = OPTIONS | {"num_kv_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = engine_of(EngineConfig(model=str(tmp_path), scheduling_policy="priority", **options))
    found = {}
    try:
        engine.add_request(request("low", low, job, priority=5))
        engine.step()
        engine.step()
        engine.add_request(request("high", high, job, priority=0))  # there is no room for both
        while engine.has_work():
            found |= {output.request_id: output.pooled for output in engine.step()}
            engine.check_integrity()
        assert engine.stats().preemptions == 1
    finally:
        engine.close()
    for name, text in (("low", low), ("high", high)):
        expected = unit(pooled(tiny_encoders.rows_of(model, text), mode))
        close(torch.frombuffer(bytearray(found[name]), dtype=torch.float32).tolist(), expected)


def request(name: str, text: list[int], job: PoolingJob | None, priority: int = 0) -> EngineRequest:
    params = SamplingParams(max_tokens=0)
    return EngineRequest(request_id=name, prompt_token_ids=text, params=params, priority=priority, pooling=job)


def test_the_engine_refuses_what_its_model_does_not_give(tmp_path: Path, null: Any) -> None:
    write_modules(save(tiny_encoders.make_stack("llama"), tmp_path), compact("mean", WIDTH))
    job = PoolingJob(needs_every_token=True)
    for engine, wrong, right in (
        (engine_of(EngineConfig(model=str(tmp_path), **OPTIONS)), None, job),
        (null.engine(), job, None),
    ):
        with pytest.raises(InvalidRequest, match="this model gives"):
            engine.add_request(request("wrong", [5, 6], wrong))
        engine.add_request(request("right", [5, 6], right))
        (output,) = engine.step()
        assert output.finish_reason is not None
        assert (output.pooled is None) is (right is None)
        engine.close()


def test_cache_hits_lose_no_rows(tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    text = texts_of(model, (64,))[0]
    for mode, hits in (("mean", False), ("cls", False), ("lasttoken", True)):
        write_modules(save(model, tmp_path / mode), compact(mode, WIDTH))
        with LLM(str(tmp_path / mode), **OPTIONS) as llm:
            first, second, longer = (llm.embed(each)[0] for each in (text, text, [*text, 7, 8]))
            assert first.num_cached_tokens == 0
            assert (second.num_cached_tokens > 0, longer.num_cached_tokens > 0) == (hits, hits)
            assert second.outputs.embedding == first.outputs.embedding
            close(longer.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, [*text, 7, 8]), mode)))


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


# -- classifiers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_classes(family: str, tmp_path: Path) -> None:
    labels = {0: "cold", 1: "warm", 2: "hot"}
    model = tiny_encoders.make_classifier(family, id2label=labels, label2id={v: k for k, v in labels.items()})
    save(model, tmp_path)
    texts = texts_of(model)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        for text, output, raw in zip(
            texts, llm.classify(texts), llm.classify(texts, use_activation=False), strict=True
        ):
            logits = tiny_encoders.logits_of(model, text)
            close(output.outputs.probs, logits.softmax(0))
            close(raw.outputs.probs, logits)
            assert output.outputs.labels == ("cold", "warm", "hot")
            assert output.outputs.num_classes == 3
        for refused in (lambda: llm.embed(texts), lambda: llm.score("a", "b"), lambda: llm.generate(texts)):
            with pytest.raises(InvalidRequest) as caught:
                refused()
            assert caught.value.field == "model"


def test_several_labels_may_hold(tmp_path: Path) -> None:
    model = tiny_encoders.make_classifier("bert", num_labels=3, problem_type="multi_label_classification")
    save(model, tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        close(llm.classify([5, 6])[0].outputs.probs, tiny_encoders.logits_of(model, [5, 6]).sigmoid())


def test_a_cross_encoder_reads_pairs(tmp_path: Path) -> None:
    model = tiny_encoders.make_classifier("bert", num_labels=1)
    write_tokenizer(save(model, tmp_path))
    query, documents = "w1 w2", ["w3 w4 w5", "w6", "w1 w2"]
    expected = []
    for words in ([7, 8, 9], [10], [5, 6]):
        ids = [1, 5, 6, 2, *words, 2]
        expected.append(tiny_encoders.logits_of(model, ids, [0] * 4 + [1] * (len(words) + 1)))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        scores = llm.score(query, documents)
        close([each.outputs.score for each in scores], torch.cat(expected).sigmoid())
        assert scores[0].prompt_token_ids == [1, 5, 6, 2, 7, 8, 9, 2]
        raw = llm.score([query] * 3, documents, use_activation=False)
        close([each.outputs.score for each in raw], torch.cat(expected))
        for queries, several, field in (
            ([query] * 2, documents, "queries"),
            (query, [], "documents"),
            ([5], "w1", "queries"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                llm.score(queries, several)  # type: ignore[arg-type]
            assert caught.value.field == field


# -- the engine ------------------------------------------------------------------------------------------------


def test_encoders_compute_texts_whole(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    texts = texts_of(model, (90, 17, 60, 96, 3, 80))
    with LLM(str(tmp_path), max_num_batched_tokens=100, max_num_seqs=3, long_prefill_threshold=8, **OPTIONS) as llm:
        for text, output in zip(texts, llm.embed(texts), strict=True):
            close(output.outputs.embedding, unit(tiny_encoders.rows_of(model, text).mean(0)))
        stats = llm.stats()
        assert (stats.kv_blocks_used, stats.kv_blocks_total, stats.preemptions) == (0, 3, 0)
        assert stats.scheduled_tokens == sum(map(len, texts))
        with pytest.raises(InvalidRequest, match="97 tokens, above max_model_len 96"):
            llm.embed([[5] * 97])
    with pytest.raises(ConfigError, match="needs a text whole"):
        LLM(str(tmp_path), max_num_batched_tokens=50, max_num_seqs=3, max_model_len=60, **OPTIONS)
    with LLM(str(tmp_path), max_num_batched_tokens=50, max_num_seqs=3, **OPTIONS) as llm:
        assert llm.max_model_len == 50


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_a_device_of_few_shapes(family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are padded; what pads them reaches no vector."""
    make = CpuBackend.__init__

    def make_with_buckets(backend: CpuBackend, config: Any) -> None:
        make(backend, config)
        backend.capabilities = dataclasses.replace(
            backend.capabilities, dynamic_shapes=False, token_buckets=(4, 16, 64), batch_invariant=False
        )

    monkeypatch.setattr(CpuBackend, "__init__", make_with_buckets)
    model = tiny_encoders.make_encoder(family) if family == "bert" else tiny_encoders.make_stack(family)
    write_modules(save(model, tmp_path), flags(mode, WIDTH))
    texts = texts_of(model, (17, 1, 64, 5, 33, 30, 30))
    with LLM(str(tmp_path), max_num_seqs=4, num_kv_blocks=100, **OPTIONS) as llm:
        assert llm.max_model_len == (64 if family == "bert" else 396)  # whole texts fit the largest step
        for text, output in zip(texts, llm.embed(texts), strict=True):
            close(output.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, text), mode)))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_over_two_ranks(family: str, tmp_path: Path) -> None:
    made = tiny_encoders.make_classifier(family, num_labels=3)
    save(made, tmp_path)
    texts = texts_of(made)
    with LLM(str(tmp_path), tensor_parallel_size=2, **OPTIONS) as llm:
        for text, output in zip(texts, llm.classify(texts, use_activation=False), strict=True):
            close(output.outputs.probs, tiny_encoders.logits_of(made, text))


def test_rows_that_are_no_numbers_fail_their_own_text(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[77] = float("nan")  # type: ignore[union-attr,index,operator]
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        expected = llm.embed([[5, 6]])[0].outputs.embedding
        with pytest.raises(RequestFailed, match="NaN or infinite"):
            llm.embed([[5, 6], [7, 77, 8]])
        assert llm.embed([[5, 6]])[0].outputs.embedding == expected


def test_a_generating_model_gives_no_vectors(tiny: Any) -> None:
    with tiny.llm("llama") as llm:
        for refused in (lambda: llm.embed([5]), lambda: llm.classify([5]), lambda: llm.score("a", "b")):
            with pytest.raises(InvalidRequest, match="gives no vectors") as caught:
                refused()
            assert caught.value.field == "model"
        assert llm.generate([5, 6])[0].finished


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
