"""Sentence-transformers' files and classifiers' configs are read as they are meant, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.core.base.errors import CheckpointError
from octavo.core.pool.read import is_encoder, read_pooler
from tests.pool.directories import FLAGS, compact, dense_config, flags, write_modules

WIDTH = 48
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH}
BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": WIDTH}


@pytest.mark.parametrize("form", [flags, compact], ids=["booleans", "compact"])
@pytest.mark.parametrize(("mode", "kind"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")])
def test_both_forms_of_a_pooling_config(tmp_path: Path, form: Any, mode: str, kind: str) -> None:
    pooler = read_pooler(LLAMA, write_modules(tmp_path, form(mode, WIDTH)))
    assert pooler is not None
    assert (pooler.task, pooler.kind, pooler.normalize, pooler.width) == ("embed", kind, True, WIDTH)
    assert pooler.include_prompt


@pytest.mark.parametrize("form", [flags, compact], ids=["booleans", "compact"])
@pytest.mark.parametrize("mode", ["max", "mean_sqrt_len_tokens", "weightedmean"])
def test_a_mode_that_is_not_implemented_is_named(tmp_path: Path, form: Any, mode: str) -> None:
    with pytest.raises(CheckpointError, match=f"{mode} is not implemented") as caught:
        read_pooler(LLAMA, write_modules(tmp_path, form(mode, WIDTH)))
    assert caught.value.field == "pooling_mode"


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({}, "no mode is not implemented"),
        ({FLAGS["mean"]: True, FLAGS["cls"]: True}, "cls with mean is not implemented"),
        ({"pooling_mode": ["mean", "cls"]}, "cls with mean is not implemented"),
        ({"pooling_mode": "mean", FLAGS["cls"]: True}, "the mode that the other fields name"),
        ({"pooling_mode": "average"}, "average is not implemented"),
        ({"pooling_mode": 3}, "pooling_mode is 3"),
        ({FLAGS["mean"]: 1}, "true or false"),
        ({"pooling_mode": "mean", "include_prompt": "no"}, "true or false"),
        ({"pooling_mode": "mean", "attention_weights": True}, "attention_weights is True"),
        ({"pooling_mode": "mean", "embedding_dimension": 47}, "hidden size is 48"),
    ],
)
def test_an_unknown_form_is_an_error_and_no_guess(tmp_path: Path, pooling: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pooler(LLAMA, write_modules(tmp_path, pooling))


def test_a_list_of_one_mode_and_agreeing_forms(tmp_path: Path) -> None:
    pooler = read_pooler(LLAMA, write_modules(tmp_path, {"pooling_mode": ["mean"], FLAGS["mean"]: True}))
    assert pooler is not None
    assert pooler.kind == "mean"


def test_the_other_files(tmp_path: Path) -> None:
    write_modules(
        tmp_path,
        {"pooling_mode": "lasttoken", "include_prompt": False},
        normalize=False,
        dense=(dense_config(WIDTH, 96), dense_config(96, 24, "linear.Identity")),
        whole={"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": "document"},
        sentence={"max_seq_length": 77, "do_lower_case": True},
    )
    pooler = read_pooler(LLAMA | {"matryoshka_dimensions": [24, 12]}, tmp_path)
    assert pooler is not None
    assert (pooler.normalize, pooler.include_prompt, pooler.lower_case, pooler.max_tokens) == (False, False, True, 77)
    assert (pooler.prompts, pooler.default_prompt) == ({"query": "Q: ", "document": "D: "}, "D: ")
    assert [(layer.in_features, layer.out_features, layer.activation) for layer in pooler.layers] == [
        (WIDTH, 96, "tanh"),
        (96, 24, "none"),
    ]
    assert (pooler.out_width, pooler.dimensions) == (24, (12, 24))


@pytest.mark.parametrize(
    ("whole", "sentence", "field"),
    [
        ({"prompts": {"query": 3}}, None, "prompts"),
        ({"prompts": ["query: "]}, None, "prompts"),
        ({"prompts": {"query": "Q: "}, "default_prompt_name": "document"}, None, "default_prompt_name"),
        (None, {"max_seq_length": 0}, "max_seq_length"),
        (None, {"transformer_task": "fill-mask"}, "transformer_task"),
        (None, {"max_seq_length": "256"}, "max_seq_length"),
    ],
)
def test_damaged_side_files(tmp_path: Path, whole: Any, sentence: Any, field: str) -> None:
    write_modules(tmp_path, flags("mean", WIDTH), whole=whole, sentence=sentence)
    with pytest.raises(CheckpointError) as caught:
        read_pooler(LLAMA, tmp_path)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["Transformer"], "the modules are Transformer"),
        (["Pooling", "Transformer"], "the modules are Pooling, Transformer"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "the modules are Transformer, Pooling, Normalize, Dense"),
        (["Transformer", "Pooling", "WeightedLayerPooling"], "WeightedLayerPooling"),
        (["Asym", "Pooling"], "the modules are Asym"),
    ],
)
def test_a_chain_that_is_not_known(tmp_path: Path, types: list[str], message: str) -> None:
    write_modules(tmp_path, flags("mean", WIDTH))
    chain = [{"path": f"{i}_x" if i else "", "type": f"sentence_transformers.models.{t}"} for i, t in enumerate(types)]
    (tmp_path / "modules.json").write_text(json.dumps(chain))
    with pytest.raises(CheckpointError, match=message) as caught:
        read_pooler(LLAMA, tmp_path)
    assert caught.value.field == "modules.json"


def test_a_normalisation_that_is_not_the_usual_one(tmp_path: Path) -> None:
    write_modules(tmp_path, flags("mean", WIDTH), sentence={"transformer_task": "feature-extraction"})
    (tmp_path / "2_Normalize").mkdir()
    (tmp_path / "2_Normalize" / "config.json").write_text("{}")
    assert read_pooler(LLAMA, tmp_path) is not None
    (tmp_path / "2_Normalize" / "config.json").write_text('{"p": 1}')
    with pytest.raises(CheckpointError) as caught:
        read_pooler(LLAMA, tmp_path)
    assert caught.value.field == "p"


@pytest.mark.parametrize("content", ["{}", "[3]", "no json", '[{"type": "evil.Module", "path": ""}]'])
def test_a_damaged_modules_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooler(LLAMA, tmp_path)


def test_a_pooling_folder_that_is_not_there(tmp_path: Path) -> None:
    write_modules(tmp_path, flags("mean", WIDTH))
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        read_pooler(LLAMA, tmp_path)


@pytest.mark.parametrize(
    ("dense", "field"),
    [
        (dense_config(WIDTH + 1, 8), "in_features"),
        (dense_config(WIDTH, 0), "out_features"),
        (dense_config(WIDTH, 8, "activation.Mish"), "activation_function"),
        (dense_config(WIDTH, 8) | {"dropout": 0.1}, "dropout"),
        (dense_config(WIDTH, 8) | {"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_a_dense_module_that_is_not_known(tmp_path: Path, dense: Any, field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_pooler(LLAMA, write_modules(tmp_path, flags("mean", WIDTH), dense=(dense,)))
    assert caught.value.field == field


def test_what_generates_text_and_what_can_not(tmp_path: Path) -> None:
    assert read_pooler(LLAMA, tmp_path) is None
    assert read_pooler(LLAMA | {"architectures": ["GPT2LMHeadModel"]}, tmp_path) is None
    for config in (BERT, LLAMA | {"architectures": ["LlamaModel"]}):
        with pytest.raises(CheckpointError, match="how they become one vector") as caught:
            read_pooler(config, tmp_path)
        assert caught.value.field == "pooling"
    by_word = read_pooler(LLAMA, tmp_path, "last")
    assert by_word is not None
    assert (by_word.kind, by_word.normalize) == ("last", True)
    assert is_encoder(BERT)
    assert not is_encoder(LLAMA)


def test_the_users_word_against_the_files(tmp_path: Path) -> None:
    write_modules(tmp_path, flags("mean", WIDTH))
    assert read_pooler(LLAMA, tmp_path, "mean") == read_pooler(LLAMA, tmp_path)
    with pytest.raises(CheckpointError, match="pools by mean, not by last"):
        read_pooler(LLAMA, tmp_path, "last")


@pytest.mark.parametrize("field", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_a_decoder_made_bidirectional_is_refused(tmp_path: Path, field: dict[str, bool]) -> None:
    write_modules(tmp_path, flags("mean", WIDTH))
    with pytest.raises(CheckpointError, match="see those to their right"):
        read_pooler(LLAMA | field, tmp_path)


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"id2label": {"0": "no"}}, ("no",), "sigmoid"),
        ({"id2label": {"1": "yes", "0": "no"}, "problem_type": "multi_label_classification"}, ("no", "yes"), "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("LABEL_0",),
            "none",
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            ("LABEL_0", "LABEL_1"),
            "sigmoid",
        ),
    ],
)
def test_labels_and_activation(tmp_path: Path, config: Any, labels: tuple[str, ...], activation: str) -> None:
    pooler = read_pooler(BERT | {"architectures": ["BertForSequenceClassification"]} | config, tmp_path)
    assert pooler is not None
    assert (pooler.task, pooler.kind, pooler.labels, pooler.activation) == ("classify", "cls", labels, activation)
    assert [layer.name for layer in pooler.layers] == ["bert.pooler.dense", "classifier"]


def test_a_decoder_as_classifier(tmp_path: Path) -> None:
    pooler = read_pooler(LLAMA | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 3}, tmp_path)
    assert pooler is not None
    assert (pooler.kind, pooler.out_width) == ("last", 3)
    assert [(layer.name, layer.bias) for layer in pooler.layers] == [("score", False)]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"id2label": ["a"]}, "id2label"),
        ({"num_labels": 0}, "num_labels"),
        ({"problem_type": "ranking"}, "problem_type"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Mish"}, "activation_fn"),
    ],
)
def test_a_damaged_classifier(tmp_path: Path, config: Any, field: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_pooler(BERT | {"architectures": ["BertForSequenceClassification"]} | config, tmp_path)
    assert caught.value.field == field
