"""Tiny random models of each family, made by Hugging Face's own classes, with their logits as the reference.

Weights are drawn with a standard deviation of 0.2: at the usual 0.02, faults of window, rotary base or norm hide under
any tolerance. Norm weights and biases are random too, since their initial ones and zeros hide as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

STD = 0.2

LLAMA: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}

GEMMA3: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 20,
    "rms_norm_eps": 1e-3,  # large enough to be seen beside embeddings scaled by the root of the width
    "rope_theta": 100_000.0,
    "rope_local_base_freq": 1_000.0,
}


def make_llama(seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A LlamaForCausalLM with `LLAMA`'s config and the overrides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return randomized(LlamaForCausalLM, LlamaConfig(**_special_ids(), **(LLAMA | overrides)), seed)


def make_gemma3(seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A Gemma3ForCausalLM with `GEMMA3`'s config and the overrides."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return randomized(Gemma3ForCausalLM, Gemma3TextConfig(**_special_ids(), **(GEMMA3 | overrides)), seed)


def save(model: torch.nn.Module, directory: Path) -> Path:
    """Write config.json and model.safetensors."""
    model.save_pretrained(directory)  # type: ignore[operator]
    return directory


def logits_of(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """Hugging Face's eager logits at every position, fp32 [T, V]."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0]
    return logits


def greedy(model: torch.nn.Module, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Hugging Face's greedy continuation, recomputed in full for each token."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Token ids drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def _special_ids() -> dict[str, Any]:
    return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def randomized(model_type: Any, config: Any, seed: int) -> torch.nn.Module:
    """A model in fp32 whose attention is eager, with every parameter and stored buffer drawn anew.

    What begins as ones (norms that multiply by their weight) stays around 1; all else is around 0.
    """
    config._attn_implementation = "eager"
    model: torch.nn.Module = model_type(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in tied or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator) * STD
            tensor.copy_(1.0 + noise if bool((tensor == 1).all()) else noise)
    return model
