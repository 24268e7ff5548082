"""`make gpu-check`: tokens a second of a random model of 300 million parameters, many requests at once.

With recorded steps and without, where the device records; the first replies, in which kernels are compiled and steps
are recorded, are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from octavo.core.backend import BackendRegistry
from tests.gpu import models

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/gpu-check"

SIZES: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 22,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


def main() -> int:
    """Measure, and write after each run. Returns 1 when a run failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    sizes, requests, length, new = (SMALL, 4, 8, 4) if args.small else (SIZES, 64, 128, 128)
    # At the usual spread of weights the logits stay finite in bf16 through many layers.
    model = models.make(FOLDER / "models/throughput", models.llama(**sizes), torch.bfloat16, std=0.02)
    found: dict[str, Any] = {"requests": requests, "prompt_tokens": length, "new_tokens": new, "runs": {}, "faults": []}
    prompts = models.prompts(sizes["vocab_size"], [length] * requests)
    for name, options in modes(args.backend).items():
        try:
            found["runs"][name] = measured(str(model), args.backend, options, prompts, new)
        except Exception as error:  # The other mode is to be seen all the same.
            found["faults"].append(f"{name}: {type(error).__name__}: {error}")
        (FOLDER / "throughput.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["faults"]))


def modes(backend: str) -> dict[str, dict[str, str]]:
    """Name -> options of the backend: with recorded steps and without, for a device that can choose."""
    info = BackendRegistry.discover().info(backend)
    return {"graphs": {}, "no graphs": {"graphs": "false"}} if info.options is not None else {"plain": {}}


def measured(model: str, backend: str, options: dict[str, str], prompts: list[list[int]], new: int) -> dict[str, float]:
    """One engine's figures."""
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    longest = max(map(len, prompts)) + new
    with LLM(model, backend=backend, backend_options=options, max_model_len=longest, max_num_seqs=len(prompts),
             kv_memory_fraction=0.3, enable_prefix_caching=False, progress=False) as llm:  # fmt: skip
        loaded = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=min(new, 8), ignore_eos=True))
        warm = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - warm
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "load_s": round(loaded - began, 2),
        "first_replies_s": round(warm - loaded, 2),
        "seconds": round(seconds, 3),
        "out_tokens": tokens,
        "out_tokens_per_s": round(tokens / seconds, 1),
        "steps_per_s": round(new / seconds, 1),
    }


if __name__ == "__main__":
    sys.exit(main())
