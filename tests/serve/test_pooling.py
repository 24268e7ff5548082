"""Embeddings, scores and rankings over HTTP, by OpenAI's own client and by plain JSON."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from octavo.core.engine.llm import LLM
from tests.fakes import tiny_encoders, tiny_models
from tests.serve.conftest import Server, error_of

TEXTS = ["How do I bake bread?", "A recipe for sourdough loaves.", "The stock market fell today."]
IDS = [[101, 2129, 102], [101, 7852, 102]]
OURS = {"num_kv_blocks": None, "max_model_len": None, "num_threads": 2}


def running(model: str) -> Iterator[Server]:
    made = Server(model, **OURS)
    with made:
        yield made


@pytest.fixture(scope="module")
def vectors() -> Iterator[Server]:
    """minilm behind HTTP."""
    yield from running("minilm")


@pytest.fixture(scope="module")
def expected() -> Iterator[LLM]:
    """The same model in this process."""
    with LLM("minilm", num_threads=2, progress=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with one label and a real vocabulary's tokenizer."""
    from octavo.core.load.demos import locate_demo

    folder = tmp_path_factory.mktemp("cross-encoder")
    model = tiny_encoders.make_classifier("bert", num_labels=1, vocab_size=30522)
    tiny_models.save(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((locate_demo("minilm") / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def classes(cross_encoder: Path) -> Iterator[Server]:
    """The cross-encoder behind HTTP."""
    yield from running(str(cross_encoder))


def embed(server: Server, given: Any, **fields: Any) -> Any:
    return server.client.embeddings.create(model="tiny", input=given, **fields)


@pytest.mark.parametrize("given", [TEXTS[0], TEXTS, IDS[0], IDS], ids=["text", "texts", "ids", "lists-of-ids"])
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_every_form_of_input(vectors: Server, expected: LLM, given: Any, encoding: str | None) -> None:
    fields = {} if encoding is None else {"encoding_format": encoding}
    reply = embed(vectors, given, **fields)
    outputs = expected.embed(given)
    assert reply.object == "list"
    assert reply.model == "tiny"
    assert [item.index for item in reply.data] == list(range(len(outputs)))
    for item, output in zip(reply.data, outputs, strict=True):
        found = item.embedding
        if isinstance(found, str):  # asked for by name; the client decodes only what it asks for by itself
            found = torch.frombuffer(bytearray(base64.b64decode(found)), dtype=torch.float32).tolist()
        assert found == output.outputs.embedding
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (tokens, tokens)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """minilm with a prompt by name."""
    from octavo.core.load.demos import locate_demo

    folder = tmp_path_factory.mktemp("prompted") / "minilm"
    shutil.copytree(locate_demo("minilm"), folder)
    named = {"prompts": {"query": "query: "}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(named), encoding="utf-8")
    yield from running(str(folder))


def test_a_prompt_by_name_stands_before_the_text(prompted: Server) -> None:
    named = prompted.post("embeddings", input=TEXTS[0], prompt_name="query", priority=1)
    assert named.status_code == 200, named.text
    written = prompted.post("embeddings", input=f"query: {TEXTS[0]}", priority=-1)
    assert named.json()["data"] == written.json()["data"]
    assert named.json()["data"] != prompted.post("embeddings", input=TEXTS[0]).json()["data"]
    assert prompted.refusal("embeddings", input=TEXTS[0], priority=10**30)["param"] == "priority"


def test_dimensions(vectors: Server, expected: LLM) -> None:
    reply = embed(vectors, TEXTS, dimensions=32)
    assert [i.embedding for i in reply.data] == [o.outputs.embedding for o in expected.embed(TEXTS, dimensions=32)]
    for item in reply.data:
        assert torch.tensor(item.embedding).norm().item() == pytest.approx(1.0, abs=1e-6)
    raw = embed(vectors, TEXTS[0], extra_body={"normalize": False}).data[0].embedding
    assert torch.tensor(raw).norm().item() != pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({}, "input"),
        ({"input": [[-1]]}, "prompt"),
        ({"input": [30522]}, "prompt"),
        ({"input": [[]]}, "prompt"),
        ({"input": [5] * 300}, "prompt"),
        ({"input": "word " * 5000}, "prompt"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 385}, "dimensions"),
        ({"input": "a", "dimensions": "8"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
    ],
)
def test_what_is_refused(vectors: Server, fields: dict[str, Any], param: str) -> None:
    assert vectors.refusal("embeddings", **fields)["param"] == param
    assert len(embed(vectors, "still there").data) == 1


def test_other_models_and_other_tasks(vectors: Server, classes: Server, server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        vectors.client.embeddings.create(model="other", input="a")
    assert vectors.refusal("completions", prompt="a")["param"] == "model"
    assert vectors.refusal("chat/completions", messages=[{"role": "user", "content": "a"}])["param"] == "model"
    assert vectors.refusal("classify", input="a")["param"] == "model"
    assert classes.refusal("embeddings", input="a")["param"] == "model"
    assert server.refusal("embeddings", input="a")["param"] == "model"
    assert server.refusal("rerank", query="a", documents=["b"])["param"] == "model"


def test_unknown_fields_are_named(vectors: Server) -> None:
    response = vectors.post("embeddings", input="a", input_type="query")
    assert response.status_code == 200
    assert response.headers["x-octavo-ignored-fields"] == "input_type"


@pytest.mark.parametrize("kind", ["embeddings", "cross-encoder"])
def test_scores_and_rankings(kind: str, request: pytest.FixtureRequest, expected: LLM, cross_encoder: Path) -> None:
    asked: Server = request.getfixturevalue("vectors" if kind == "embeddings" else "classes")
    query, documents = TEXTS[0], [TEXTS[2], TEXTS[1], "Cats sleep."]
    if kind == "embeddings":
        outputs = expected.score(query, documents)
    else:
        with LLM(str(cross_encoder), num_threads=2, progress=False) as llm:
            outputs = llm.score(query, documents)
    scores = [output.outputs.score for output in outputs]
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    reply = asked.post("score", text_1=query, text_2=documents).json()
    assert [(item["index"], item["score"]) for item in reply["data"]] == list(enumerate(scores))
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    best = sorted(range(3), key=lambda place: -scores[place])
    ranked = asked.post("rerank", query=query, documents=documents).json()
    assert [item["index"] for item in ranked["results"]] == best
    assert [item["relevance_score"] for item in ranked["results"]] == [scores[place] for place in best]
    assert [item["document"]["text"] for item in ranked["results"]] == [documents[place] for place in best]
    top = asked.post("rerank", query=query, documents=documents, top_n=1, return_documents=False).json()["results"]
    assert top == [{"index": best[0], "relevance_score": scores[best[0]]}]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "queries"),
        ("score", {"text_1": [], "text_2": "c"}, "text_1"),
        ("score", {"text_1": "a", "text_2": [5]}, "text_2"),
        ("rerank", {"query": "a", "documents": []}, "documents"),
        ("rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["word " * 400]}, "prompt"),
    ],
)
def test_scores_that_are_refused(vectors: Server, path: str, fields: dict[str, Any], param: str) -> None:
    assert vectors.refusal(path, **fields)["param"] == param


def test_classes(classes: Server, cross_encoder: Path) -> None:
    with LLM(str(cross_encoder), num_threads=2, progress=False) as llm:
        outputs = llm.classify(TEXTS)
    reply = classes.post("classify", input=TEXTS).json()
    assert reply["data"] == [
        {"index": index, "label": "LABEL_0", "probs": output.outputs.probs, "num_classes": 1}
        for index, output in enumerate(outputs)
    ]


def test_a_text_that_fails_by_itself_is_a_500(tmp_path: Path) -> None:
    model = tiny_encoders.make_classifier("bert")
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[7] = float("nan")  # type: ignore[union-attr,index,operator]
    for made in running(str(tiny_models.save(model, tmp_path / "model"))):
        assert "NaN" in error_of(made.post("classify", input=[[5, 7]]), 500)["message"]
        assert made.post("classify", input=[[5, 6]]).status_code == 200
