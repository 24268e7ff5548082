"""Tiny random encoders and classifiers, made by Hugging Face's own classes, with their outputs as the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tests.fakes import tiny_models
from tests.fakes.tiny_family import TinyFamily

ENCODER: dict[str, Any] = {
    "vocab_size": 197,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-6,
}
_SIZES = ENCODER | {"num_hidden_layers": 2, "layer_norm_eps": 1e-3}
_UNUSED: Mapping[str, str] = {
    "attention_probs_dropout_prob": "training only",
    "hidden_dropout_prob": "training only",
    "classifier_dropout": "training only",
    "tie_word_embeddings": "of a head that encoders have not",
}
_PADDING = ("pad_token_id",)
ENCODERS: Mapping[str, TinyFamily] = {
    "bert": TinyFamily("BertConfig", "BertModel", _SIZES | {"pad_token_id": None}, inert=_UNUSED),
    "roberta": TinyFamily(
        "RobertaConfig", "RobertaModel", _SIZES | {"pad_token_id": 1}, inert=_UNUSED, matters=_PADDING
    ),
    "xlm-roberta": TinyFamily(
        "XLMRobertaConfig", "XLMRobertaModel", _SIZES | {"pad_token_id": 3}, inert=_UNUSED, matters=_PADDING
    ),
}
"""Encoders, without a head. Never written to."""


def make_encoder(family: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A BertModel, RobertaModel or XLMRobertaModel."""
    return _make(family, "Model", seed, overrides)


def make_classifier(family: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """The same with a head for sequences; or "llama" with one."""
    return _make(family, "ForSequenceClassification", seed, overrides)


def make_stack(family: str, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """The stack of a decoder alone: a LlamaModel or Gemma3TextModel."""
    return _make(family, "Model", seed, overrides)


def rows_of(model: torch.nn.Module, token_ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
    """Hugging Face's last hidden rows, fp32 [T, M]."""
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    with torch.no_grad():
        rows: torch.Tensor = model(torch.tensor([list(token_ids)]), **more).last_hidden_state[0]
    return rows


def logits_of(model: torch.nn.Module, token_ids: Sequence[int], types: Sequence[int] | None = None) -> torch.Tensor:
    """Hugging Face's logits of the labels, fp32 [N]."""
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), **more).logits[0]
    return logits


def random_text(config: Any, length: int, seed: int = 0) -> list[int]:
    """Token ids without the padding's."""
    ids = tiny_models.random_prompt(config.vocab_size - 1, length, seed)
    padding = getattr(config, "pad_token_id", None)
    return [token + (padding is not None and token >= padding) for token in ids]


def _make(family: str, ending: str, seed: int, overrides: dict[str, Any]) -> torch.nn.Module:
    import transformers

    names = {
        "bert": "Bert",
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "llama": "Llama",
        "gemma3": "Gemma3Text",
    }
    name = names[family]
    if family in ("llama", "gemma3"):
        base = {"llama": tiny_models.LLAMA, "gemma3": tiny_models.GEMMA3}[family]
        base = base | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    else:
        base = ENCODER | {"pad_token_id": 0 if family == "bert" else 1}
    config = getattr(transformers, f"{name}Config")(**(base | overrides))
    more = {"add_pooling_layer": False} if ending == "Model" and base.get("type_vocab_size") else {}
    config._attn_implementation = "eager"
    model: torch.nn.Module = getattr(transformers, f"{name}{ending}")(config, **more).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * tiny_models.STD
            is_norm = "LayerNorm.weight" in parameter_name or "layernorm" in parameter_name
            is_norm |= parameter_name.endswith("norm.weight")
            parameter.copy_(1.0 + noise if is_norm and family != "gemma3" else noise)
    return model
