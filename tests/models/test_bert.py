"""Hidden rows of tiny random encoders equal Hugging Face's, for ragged batches and for pairs of texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.backend.device import StepBuffers
from octavo.core.backend.kv import AttentionMetadata
from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.models.registry import read_config
from tests.fakes import tiny_encoders, tiny_models
from tests.models.step_runner import load_model, relative_error

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


class TextRunner:
    """An encoder driven by hand: whole texts, ragged, with or without second texts."""

    def __init__(self, model: torch.nn.Module, backend: Any, directory: Path) -> None:
        checkpoint = open_checkpoint(ModelSource("tiny", tiny_models.save(model, directory), "safetensors"))
        self._model, self._opset = load_model(checkpoint, backend, max_model_len=64, has_head=False)
        self._backend = backend
        self.names = checkpoint.names()
        checkpoint.close()

    def rows(self, texts: Sequence[Sequence[int]], seconds: Sequence[int | None] | None = None) -> list[torch.Tensor]:
        """Hidden rows of each text; seconds: where the second text of each begins."""
        lengths = [len(text) for text in texts]
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        offset = self._model.config.max_position
        positions = [
            position + (offset if second is not None and position >= second else 0)
            for length, second in zip(lengths, seconds or [None] * len(texts), strict=True)
            for position in range(length)
        ]
        buffers = StepBuffers(
            token_ids_T=self._tensor([token for text in texts for token in text], torch.int64),
            positions_T=self._tensor(positions, torch.int64),
            plans=(self._opset.plan(self._metadata(lengths, starts)),),
            logit_rows_R=self._tensor(range(starts[-1]), torch.int64),
            logits_RV=self._backend.empty(starts[-1], self._model.vocab_size, dtype=torch.float32),
        )
        self._model.forward(buffers)
        return list(self._backend.to_host(buffers.logits_RV).split(lengths))

    def _metadata(self, lengths: list[int], starts: list[int]) -> AttentionMetadata:
        return AttentionMetadata(
            num_requests=len(lengths),
            num_tokens=starts[-1],
            max_query_len=max(lengths),
            max_seq_len=max(lengths),
            query_start_loc=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(lengths, torch.int32),
            block_table=self._tensor([[b] for b in range(len(lengths))], torch.int32),
            slot_mapping=self._tensor([-1] * starts[-1], torch.int64),
            block_size=64,
        )

    def _tensor(self, values: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor: torch.Tensor = self._backend.from_host(torch.tensor(list(values), dtype=dtype))
        return tensor


def make(case: str) -> torch.nn.Module:
    family = "xlm-roberta" if case.startswith("xlm") else case.split("-")[0]
    return tiny_encoders.make_encoder(family, **CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_ragged_batch_equal_hugging_face(case: str, backend: Any, tmp_path: Path) -> None:
    model = make(case)
    runner = TextRunner(model, backend, tmp_path)
    texts = [tiny_encoders.random_text(model.config, length) for length in LENGTHS]
    for text, rows in zip(texts, runner.rows(texts), strict=True):
        assert relative_error(rows, tiny_encoders.rows_of(model, text)) < TOLERANCE, len(text)


@pytest.mark.parametrize("case", ["bert", "bert-four-types", "roberta"])
def test_pairs_of_texts(case: str, backend: Any, tmp_path: Path) -> None:
    model = make(case)
    runner = TextRunner(model, backend, tmp_path)
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
    runner = TextRunner(model, backend, tmp_path)
    texts = [tiny_encoders.random_text(model.config, length) for length in LENGTHS]
    for text, rows in zip(texts, runner.rows(texts), strict=True):
        alone = runner.rows([text])[0]
        assert torch.equal(rows, alone) if backend.capabilities.batch_invariant else relative_error(rows, alone) < 1e-5


def test_longest_text(backend: Any, tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("roberta", max_position_embeddings=66)
    runner = TextRunner(model, backend, tmp_path)
    assert runner._model.max_position == 64
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
