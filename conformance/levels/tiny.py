"""Tiny random models of each family: a config and a checkpoint in memory, both made from a seed.

Weights are drawn with a standard deviation of 0.2: at the usual 0.02, faults of window, rotary base or norm hide under
any tolerance. Norm weights are random too, since ones hide as much.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.conformance.draw import Draw
from octavo.conformance.harness.host import HostBackend
from octavo.core.backend import OpSet
from octavo.core.load.checkpoint import CheckpointFormat
from octavo.core.models.registry import build_model

STD = 0.2
HIDDEN_SIZE = 48
MAX_LENGTH = 256
NUM_LAYERS = 4

SPREAD = STD * math.sqrt(HIDDEN_SIZE)
"""Standard deviation of the logits: a normed row has an element size of 1, and a head's column HIDDEN_SIZE of STD."""

_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "max_position_embeddings": MAX_LENGTH,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": _SIZES
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 199,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    },
    "gemma3": _SIZES
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": 211,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 20,
        "rms_norm_eps": 1e-3,  # large enough to be seen beside embeddings scaled by the root of the width
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 1_000.0,
        "tie_word_embeddings": False,  # tied, its scaled embeddings would have every token repeat itself
    },
}
"""Family -> config.json. Never written to."""

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class TinyCheckpoint:
    """A checkpoint without files. Implements `core.load.Checkpoint`.

    Args:
        family: of CONFIGS.
        seed: of the weights, which depend on it and on a tensor's name alone.
        dtype: in which they are stored: every tensor is rounded to it, once and for all who read it.
    """

    format: CheckpointFormat = "safetensors"
    norm_weights_include_one = False

    def __init__(self, family: str, seed: int, dtype: torch.dtype) -> None:
        self.path = Path(f"tiny-{family}")
        self.config: Mapping[str, Any] = {**CONFIGS[family], "dtype": str(dtype).removeprefix("torch.")}
        self.generation_config: Mapping[str, Any] = {}
        self.metadata: Mapping[str, Any] = {}
        self.fingerprint = f"{family}-{seed}-{dtype}"
        self._dtype = dtype
        self._tensors = {
            name: _drawn(name, shape, seed, ones=family == "llama" and name.endswith("norm.weight")).to(dtype)
            for name, shape in _shapes(self.config).items()
        }
        self.total_bytes = sum(x.nbytes for x in self._tensors.values())

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored_dtype(self, name: str) -> str:
        return _STORED[self._dtype]

    def stored_bytes(self, name: str) -> int:
        return self._tensors[name].nbytes

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._tensors[name] if out is None else out.copy_(self._tensors[name])

    def read_stored(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._tensors if names is None else names:
            yield name, self._tensors[name]

    def tokenizer_files(self) -> Mapping[str, Path]:
        return {}

    def close(self) -> None:
        return


def drawn_seed(draw: Draw) -> int:
    """A case's own seed, of its model and its prompts."""
    return draw.generator.initial_seed()


def prompt(family: str, length: int, seed: int) -> list[int]:
    """Token ids drawn evenly from a family's vocabulary."""
    generator = _generator(seed, f"prompt of {length}")
    ids: list[int] = torch.randint(0, CONFIGS[family]["vocab_size"], (length,), generator=generator).tolist()
    return ids


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor that the family's model wants, by asking one."""
    backend = HostBackend()
    model = build_model(
        config,
        backend=backend,
        opset=OpSet(backend),
        dtype=torch.float32,
        kv_dtype=torch.float32,
        block_size=16,
        max_num_batched_tokens=1,
        max_model_len=MAX_LENGTH,
    )
    return {name: target.shape for name, target in model.weight_targets().items() if target.required}


def _drawn(name: str, shape: tuple[int, ...], seed: int, *, ones: bool) -> torch.Tensor:
    return torch.randn(shape, generator=_generator(seed, name)) * STD + float(ones)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
