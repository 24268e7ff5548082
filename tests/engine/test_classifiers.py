"""Classes and scores of pairs equal Hugging Face's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo.core.base.errors import InvalidRequest
from octavo.core.engine.llm import LLM
from tests.engine.vectors import OPTIONS, close, save, texts_of, write_tokenizer
from tests.fakes import tiny_encoders


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


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_over_two_ranks(family: str, tmp_path: Path) -> None:
    made = tiny_encoders.make_classifier(family, num_labels=3)
    save(made, tmp_path)
    texts = texts_of(made)
    with LLM(str(tmp_path), tensor_parallel_size=2, **OPTIONS) as llm:
        for text, output in zip(texts, llm.classify(texts, use_activation=False), strict=True):
            close(output.outputs.probs, tiny_encoders.logits_of(made, text))
