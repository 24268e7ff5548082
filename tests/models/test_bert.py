"""Hidden rows of tiny random encoders equal Hugging Face's, for ragged batches and for pairs of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.models.registry import read_config
from tests.fakes import tiny_encoders, tiny_models
from tests.models.step_runner import relative_error
from tests.models.text_runner import TextRunner

TOLERANCE = 1e-4
LENGTHS = (17, 1, 60, 3)
CASES = {
    "bert": {},
    "bert-gelu-tanh": {"hidden_act": "gelu_new"},
    "bert-relu-one-head": {"hidden_act": "relu", "num_attention_heads": 1, "layer_norm_eps": 1e-3},
    "bert-four-types": {"type_vocab_size": 4},
    "roberta": {},
    "roberta-padding-first": {"pad_token_id": 0, "type_vocab_size": 1},
    "xlm-roberta": {"pad_token_id": 5},
}


def make(case: str) -> torch.nn.Module:
    family = "xlm-roberta" if case.startswith("xlm") else case.split("-")[0]
    return tiny_encoders.make_encoder(family, **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_ragged_batch_equal_hugging_face(case: str, backend: Any, tmp_path: Path) -> None:
    model = make(case)
    runner = TextRunner(tiny_models.save(model, tmp_path), backend)
    texts = [tiny_encoders.random_text(model.config, length) for length in LENGTHS]
    for text, rows in zip(texts, runner.rows(texts), strict=True):
        assert relative_error(rows, tiny_encoders.rows_of(model, text)) < TOLERANCE, len(text)


@pytest.mark.parametrize("case", ["bert", "bert-four-types", "roberta"])
def test_pairs_of_texts(case: str, backend: Any, tmp_path: Path) -> None:
    model = make(case)
    runner = TextRunner(tiny_models.save(model, tmp_path), backend)
    texts = [tiny_encoders.random_text(model.config, length) for length in LENGTHS]
    seconds = [5, None, 59, 1]
    for text, second, rows in zip(texts, seconds, runner.rows(texts, seconds), strict=True):
        types = [int(second is not None and position >= second) for position in range(len(text))]
        expected = tiny_encoders.rows_of(model, text, types)
        assert relative_error(rows, expected) < TOLERANCE
        if second is not None:  # the second text's type is seen at all
            assert relative_error(rows, tiny_encoders.rows_of(model, text)) > 100 * TOLERANCE


def test_a_text_alone_has_the_rows_it_has_in_a_batch(backend: Any, tmp_path: Path) -> None:
    model = make("bert")
    runner = TextRunner(tiny_models.save(model, tmp_path), backend)
    texts = [tiny_encoders.random_text(model.config, length) for length in LENGTHS]
    for text, rows in zip(texts, runner.rows(texts), strict=True):
        alone = runner.rows([text])[0]
        assert torch.equal(rows, alone) if backend.capabilities.batch_invariant else relative_error(rows, alone) < 1e-5


def test_longest_text(backend: Any, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("roberta", max_position_embeddings=66)
    runner = TextRunner(tiny_models.save(model, tmp_path), backend)
    assert runner.max_position == 64
    text = tiny_encoders.random_text(model.config, 64)
    assert relative_error(runner.rows([text])[0], tiny_encoders.rows_of(model, text)) < TOLERANCE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "mish"),
        ("num_attention_heads", 5),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("embedding_size", 128),
        ("max_position_embeddings", 0),
        ("layer_norm_eps", -1.0),
    ],
)
def test_a_field_that_is_not_implemented_is_refused(field: str, value: Any) -> None:
    config = make("bert").config.to_dict() | {"architectures": ["BertModel"], field: value}
    with pytest.raises(CheckpointError) as caught:
        read_config(config)
    assert caught.value.field == field


def test_roberta_without_room_before_its_first_position() -> None:
    config = make("roberta").config.to_dict() | {"architectures": ["RobertaModel"]}
    assert read_config(config).max_position == config["max_position_embeddings"] - 2
    with pytest.raises(CheckpointError, match="positions begin at 600"):
        read_config(config | {"pad_token_id": 599})
