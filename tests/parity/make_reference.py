"""Writes tests/parity/reference/*.json: greedy tokens of Hugging Face in fp32, on the weights of the same GGUF file.

    python tests/parity/make_reference.py [smollm2] [gemma3-270m]

Takes minutes per model, which is why the result is committed. Each prompt's record holds its token ids (by Hugging
Face's tokenizer), the tokens that follow, and for each of them the gap between the two largest logits: where it is
tiny, another order of additions may rightly choose the other token. One more record, `long`, is a document longer than
Gemma's window.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch

from octavo.core.load.demos import DEMO_MODELS, locate_demo

HERE = Path(__file__).parent
GENERATING = [name for name, demo in DEMO_MODELS.items() if demo.generates]
NUM_TOKENS = 64
NUM_LONG_PROMPT_TOKENS = 1500


def main(names: list[str]) -> None:
    """Write the reference of each model named, or of all."""
    for name in names or GENERATING:
        reference = make_reference(name)
        file = HERE / "reference" / f"{name}.json"
        file.write_text(_one_record_a_line(reference), encoding="utf-8")
        sys.stderr.write(f"wrote {file}\n")


def make_reference(name: str) -> dict[str, Any]:
    """Everything the parity tests compare with, for one demo model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(locate_demo(name))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    own_prompts = _prompts(name)
    document = "\n\n".join(prompt for each in sorted(GENERATING) for prompt in _prompts(each))
    records = []
    for index, prompt in enumerate(own_prompts):
        records.append(greedy(model, tokenizer(prompt)["input_ids"]))
        sys.stderr.write(f"{name}: {index + 1} of {len(own_prompts)}\n")
    return {
        "model": name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {package: importlib.metadata.version(package) for package in ("torch", "transformers", "gguf")},
        "long": greedy(model, tokenizer(document)["input_ids"][:NUM_LONG_PROMPT_TOKENS]),
        "prompts": records,
    }


@torch.no_grad()
def greedy(model: Any, prompt_token_ids: list[int]) -> dict[str, list[Any]]:
    """The most likely continuation, not ended by any token, and the gap between the two best logits at each token."""
    token_ids: list[int] = []
    gaps: list[float] = []
    inputs, cache = torch.tensor([prompt_token_ids]), None
    while len(token_ids) < NUM_TOKENS:
        output = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        token_ids.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        inputs = torch.tensor([token_ids[-1:]])
    return {"prompt_token_ids": prompt_token_ids, "token_ids": token_ids, "gaps": gaps}


def _prompts(name: str) -> list[str]:
    prompts: list[str] = json.loads((HERE / "prompts" / f"{name}.json").read_text(encoding="utf-8"))
    return prompts


def _one_record_a_line(reference: dict[str, Any]) -> str:
    """JSON whose lists of numbers stay on one line, so that a change shows as the records that changed."""
    records = ",\n  ".join(json.dumps(record) for record in reference["prompts"])
    head = ",\n ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in reference.items() if k != "prompts")
    return f'{{{head},\n "prompts": [\n  {records}\n ]}}\n'


if __name__ == "__main__":
    main(sys.argv[1:])
