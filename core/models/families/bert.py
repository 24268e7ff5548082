"""BERT, RoBERTa and XLM-RoBERTa: encoders that differ in where positions begin and in how tensors are named.

A text's positions count up from its first token. (RoBERTa's own code leaves padding tokens out of the count; a batch
without padding has none, unless a text spells the padding token out.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.backend.specs import ActivationKind
from octavo.core.models.config import ConfigReader
from octavo.core.models.encoder import EncoderConfig

_ACTIVATIONS: Mapping[str, ActivationKind] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_INERT = {
    "attention_probs_dropout_prob": "training only",
    "hidden_dropout_prob": "training only",
    "classifier_dropout": "training only",
    "gradient_checkpointing": "training only",
    "tie_word_embeddings": "of a head that is not used",
    "directionality": "a note",
    "output_past": "another runtime's cache",
}
_POOLER_FIELDS = ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
"""Of a pooler that no published encoder has; written into multilingual BERT's config all the same."""


def read_bert(values: Mapping[str, Any]) -> EncoderConfig:
    """BertModel, BertForSequenceClassification. Raises CheckpointError."""
    return _read(values, "bert.", follows_padding=False)


def read_roberta(values: Mapping[str, Any]) -> EncoderConfig:
    """RobertaModel, XLMRobertaModel, and their sequence classifiers. Raises CheckpointError."""
    return _read(values, "roberta.", follows_padding=True)


def _read(values: Mapping[str, Any], prefix: str, *, follows_padding: bool) -> EncoderConfig:
    reader = ConfigReader(values)
    names = values.get("architectures") or [""]
    first_position = _padding_id(reader, values) + 1 if follows_padding else 0
    hidden_size, num_heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise reader.refuse("num_attention_heads", f"it must divide hidden_size, {hidden_size}")
    table_positions = reader.integer("max_position_embeddings")
    if table_positions <= first_position:
        raise reader.refuse("max_position_embeddings", f"positions begin at {first_position}")
    config = EncoderConfig(
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.layers("num_hidden_layers"),
        num_heads=num_heads,
        table_positions=table_positions,
        first_position=first_position,
        token_types=reader.integer("type_vocab_size", 2),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        activation=reader.choice("hidden_act", _ACTIVATIONS, "gelu"),
        prefix="" if str(names[0]).endswith("Model") else prefix,
    )
    reader.choice("position_embedding_type", {"absolute": True}, "absolute")
    reader.finish(inert=(*_INERT, *_POOLER_FIELDS, "pooler_type"))
    return config


def _padding_id(reader: ConfigReader, values: Mapping[str, Any]) -> int:
    padding = values.get("pad_token_id", 1)
    if type(padding) is not int or padding < 0:
        raise reader.refuse("pad_token_id", "positions begin after it, so it must be an integer of at least 0")
    return padding
