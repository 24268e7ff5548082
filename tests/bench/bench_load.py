"""How fast weights are loaded: from the page cache, and cold beside a plain read of the same file in the same turn.

    python tests/bench/bench_load.py [--layers 8] [--turns 5]

Prints GB/s of the file for each storage dtype, the disk's own speed, and the host's peak memory beside the weights.
Bars: 1 GB/s from the page cache; 70 % of the disk cold.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig
from octavo.core.backend.opset import OpSet
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.load.stream import load_weights
from octavo.core.models.registry import build_model

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 2048, 5632, 32, 8, 32000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(Path(folder), args.layers)
        for dtype in (torch.bfloat16, torch.float32):
            warm = [load(file.parent, dtype) for _ in range(args.turns) if read(file)]
            ratios, disk = [], []
            for _ in range(args.turns):
                forget(file)
                disk.append(read(file))
                forget(file)
                ratios.append(load(file.parent, dtype) / disk[-1])
            print(
                f"{str(dtype).removeprefix('torch.')}: page cache {statistics.median(warm) / 1e9:.2f} GB/s; cold "
                f"{statistics.median(ratios):.2f} of the disk's {statistics.median(disk) / 1e9:.2f} GB/s; "
                f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9:.2f} GB of a process whose "
                f"file has {file.stat().st_size / 1e9:.2f} GB"
            )


def write_model(folder: Path, num_layers: int) -> Path:
    """A llama of random bf16 weights; returns its file of weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
    }
    (folder / "config.json").write_text(json.dumps(config))
    key = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        attention = {"q": (HIDDEN, HIDDEN), "k": (key, HIDDEN), "v": (key, HIDDEN), "o": (HIDDEN, HIDDEN)}
        shapes |= {f"{prefix}.self_attn.{name}_proj": shape for name, shape in attention.items()}
        inner = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
        shapes |= {f"{prefix}.mlp.{name}_proj": shape for name, shape in inner.items()}
        shapes |= {f"{prefix}.{name}": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    file = folder / "model.safetensors"
    save_file({f"{name}.weight": torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, file)
    return file


def load(folder: Path, dtype: torch.dtype) -> float:
    """Bytes of the file per second, packing included."""
    backend = CpuBackend(BackendConfig(num_threads=2))
    checkpoint = open_checkpoint(ModelSource("bench", folder, "safetensors"))
    model = build_model(
        checkpoint.config,
        backend=backend,
        opset=OpSet(backend),
        dtype=dtype,
        kv_dtype=torch.float32,
        block_size=16,
        max_num_batched_tokens=64,
        max_model_len=256,
    )
    report = load_weights(checkpoint, model.weight_targets(), progress=False)
    checkpoint.close()
    backend.close()
    return report.stored_bytes / report.seconds


def read(file: Path) -> float:
    """Bytes per second of a plain read."""
    started = time.perf_counter()
    with file.open("rb", buffering=0) as stream:
        while stream.read(16 << 20):
            pass
    return file.stat().st_size / (time.perf_counter() - started)


def forget(file: Path) -> None:
    """Take a file's pages out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


if __name__ == "__main__":
    main()
