"""Decoders without a family of their own run on transformers' modelling over our attention, and equal it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.models.registry import read_config
from octavo.core.parallel.shard import Shard
from tests.fakes import tiny_models
from tests.models.step_runner import relative_error

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 199,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "intermediate_size": 80}
MODELS: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {"intermediate_size": 80},  # parameters renamed in checkpoints
    "OPTForCausalLM": {"ffn_dim": 80, "word_embed_proj_dim": 48},  # learned positions, tied head
    "GPT2LMHeadModel": {"n_positions": 512},  # transposed products
    "OlmoForCausalLM": GROUPED,
    "Olmo3ForCausalLM": {**GROUPED, "sliding_window": 9},  # layers with and without a window
    "Exaone4ForCausalLM": {**GROUPED, "sliding_window": 9, "head_dim": 16},  # heads wider than M / H
}


def make(architecture: str, **changes: Any) -> torch.nn.Module:
    import transformers

    ending = "LMHeadModel" if architecture.endswith("LMHeadModel") else "ForCausalLM"
    config_class = getattr(transformers, f"{architecture.removesuffix(ending)}Config")
    config = config_class(**SIZES | MODELS.get(architecture, {}) | changes)
    config._attn_implementation = "eager"
    model: torch.nn.Module = getattr(transformers, architecture)(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("architecture", MODELS)
def test_logits_and_greedy_tokens_equal_hugging_face(architecture, runner_of):
    model = make(architecture)
    runner = runner_of(model)
    prompt = tiny_models.random_prompt(199, 60)
    expected = tiny_models.logits_of(model, prompt)
    assert relative_error(runner.prompt("whole", prompt), expected) < TOLERANCE
    assert relative_error(runner.prompt("chunks", prompt, 7), expected) < TOLERANCE
    batch = [("one", prompt[:20]), ("two", prompt[:33])]
    for (_, tokens), logits in zip(batch, runner.step(batch, keep=1), strict=True):
        assert relative_error(logits[0], expected[len(tokens) - 1]) < TOLERANCE
    assert runner.greedy("greedy", prompt[:17], 8) == tiny_models.greedy(model, prompt[:17], 8)


def test_buffers_that_checkpoints_hold_are_loaded(runner_of):
    model = make("ApertusForCausalLM", **GROUPED)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.fill_(0.3)
    assert any("beta" in name for name in model.state_dict())
    prompt = tiny_models.random_prompt(199, 20)
    assert relative_error(runner_of(model).prompt("a", prompt), tiny_models.logits_of(model, prompt)) < TOLERANCE


def test_what_it_is_is_said_at_the_start(caplog):
    with caplog.at_level(logging.WARNING):
        read_config(make("OlmoForCausalLM").config.to_dict() | {"architectures": ["OlmoForCausalLM"]})
    assert "OlmoForCausalLM is not implemented natively" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("BloomForCausalLM", {}, "attention interface"),
        ("OlmoeForCausalLM", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, "rearranged"),
        ("ElectraForCausalLM", {"intermediate_size": 80, "is_decoder": False}, "not causal"),
        ("OlmoForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "length"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(architecture, changes, reason):
    values = make(architecture, **changes).config.to_dict() | {"architectures": [architecture]}
    with pytest.raises(CheckpointError, match=reason):
        read_config(values)


def test_ranks_cannot_share_it():
    values = make("OlmoForCausalLM").config.to_dict() | {"architectures": ["OlmoForCausalLM"]}
    shard = Shard(1, 2, Shard.single().comm)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        read_config(values).kv_specs(torch.float32, 16, shard)
