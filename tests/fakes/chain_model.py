"""A tiny llama that writes what a test has laid down: after the token a, greedily, comes the token b.

Attention and MLP add nothing, so the next token depends on the last one alone; the output matrix maps each token of
a chain to its successor. It is an ordinary checkpoint, so it also runs where no test can reach: in an engine process.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 64
PEAK = 20.0
"""The logit of a token's successor; of other tokens it is around 0."""


def save_chain_model(
    directory: Path, chains: Sequence[Sequence[int]], vocab_size: int, end_token_id: int, **config: Any
) -> Path:
    """Write config.json and model.safetensors.

    Args:
        chains: token ids in the order they follow each other; no token has two successors.
        config: further keys of config.json.
    """
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(vocab_size, HIDDEN, generator=generator)
    written = sorted({token for chain in chains for token in chain})
    if len(written) <= HIDDEN:  # then no two of them look alike, however many come before one
        rows = torch.empty(len(written), HIDDEN)
        embedding[written] = torch.nn.init.orthogonal_(rows, HIDDEN**0.5, generator=generator)
    output = torch.zeros(vocab_size, HIDDEN)
    for chain in chains:
        for last, following in itertools.pairwise(chain):
            direction = embedding[last] / embedding[last].pow(2).mean().sqrt()
            output[following] += PEAK / HIDDEN * direction
    facts: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "eos_token_id": end_token_id,
    }
    layer = "model.layers.0."
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": output,
        f"{layer}input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}self_attn.q_proj.weight": torch.zeros(64, HIDDEN),
        f"{layer}self_attn.k_proj.weight": torch.zeros(32, HIDDEN),
        f"{layer}self_attn.v_proj.weight": torch.zeros(32, HIDDEN),
        f"{layer}self_attn.o_proj.weight": torch.zeros(HIDDEN, 64),
        f"{layer}mlp.gate_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        f"{layer}mlp.up_proj.weight": torch.zeros(HIDDEN, HIDDEN),
        f"{layer}mlp.down_proj.weight": torch.zeros(HIDDEN, HIDDEN),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(facts | config))
    save_file(weights, directory / "model.safetensors")
    return directory
