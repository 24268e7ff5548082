"""`make gpu-check`: tokens of the engine on the device against the engine on the CPU, on small random models.

    fp32   greedy tokens are equal; where they part, the CPU's two best logits were within 1e-3
    bf16   the CPU's tokens are scored by both: the best token is the same wherever the CPU's two best lie further
           apart than 8 x the rms error of the device's logits, which may be a twentieth of their spread at the most

The same checkpoint is read by both; the CPU computes in fp32, so that what bf16 costs is part of the measured error. An
error as large as the gaps would decide nothing: less than a third of the positions decided is a fault.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, SamplingParams
from tests.gpu import models

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/gpu-check"
GAP = 1e-3
ERRORS = 8
LARGEST_ERROR = 1 / 20
FEWEST_DECIDED = 1 / 3

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip

Scores = list[dict[int, float]]
"""Per position, token id -> natural log of its probability."""


def main() -> int:
    """Compare both families in both types. Returns 1 for a fault."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    sizes = SMALL if args.small else SIZES
    lengths, new = ([5, 20], 6) if args.small else ([1, 5, 16, 17, 64, 130, 257, 300], 48)
    prompts = models.prompts(sizes["vocab_size"], lengths)
    found: dict[str, Any] = {"lines": [], "faults": [], "checks": {}}
    for family, config in (("llama", models.llama(**sizes)), ("gemma3", models.gemma3(**sizes, sliding_window=24))):
        for dtype, check in ((torch.float32, same_tokens), (torch.bfloat16, same_choices)):
            name = f"{family} {str(dtype).removeprefix('torch.')}"
            began = time.monotonic()
            try:
                model = models.make(FOLDER / "models" / name.replace(" ", "-"), config, dtype)
                result = check(str(model), args.backend, prompts, new)
            except Exception as error:  # The other models are to be seen all the same.
                result = {"line": "failed", "faults": [f"{type(error).__name__}: {error}"]}
            result["seconds"] = round(time.monotonic() - began, 1)
            found["checks"][name] = result
            found["lines"].append(f"{name}: {result['line']}")
            found["faults"] += [f"{name}: {fault}" for fault in result["faults"]]
            (FOLDER / "tokens.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(found["faults"]))


@contextmanager
def engine(model: str, backend: str) -> Iterator[LLM]:
    """With room for the few requests of this check."""
    with LLM(model, backend=backend, max_model_len=512, num_kv_blocks=600, progress=False) as llm:
        yield llm


def same_tokens(model: str, backend: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """The rule for fp32."""
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=2)
    replies = []
    for name in ("cpu", backend):
        with engine(model, name) as llm:
            replies.append([output.outputs[0] for output in llm.generate(prompts, greedy)])
    faults, compared, excused = [], 0, 0
    for index, (want, got) in enumerate(zip(*replies, strict=True)):
        at = parting(want.token_ids, got.token_ids)
        compared += new if at is None else at
        if at is None:
            continue
        gap = best_gap({token: entry.logprob for token, entry in (want.logprobs or [])[at].items()})
        if gap <= GAP:
            excused += 1
        else:
            faults.append(f"prompt {index}, token {at}: {got.token_ids[at]} for {want.token_ids[at]}, {gap:.4f} apart")
    line = f"{compared} tokens equal, {excused} replies part within {GAP:g}, {len(faults)} beyond"
    return {"line": line, "compared": compared, "excused": excused, "faults": faults}


def same_choices(model: str, backend: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """The rule for bf16."""
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    with engine(model, "cpu") as llm:
        outputs = llm.generate(prompts, greedy)
        forced = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
        want = scores(llm, forced)
    with engine(model, backend) as llm:
        got = scores(llm, forced)
    return judged(want, got)


def judged(want: Scores, got: Scores) -> dict[str, Any]:
    """Whether the device's choices are the CPU's wherever its error allows to tell."""
    errors = [
        got_at[token] - score for want_at, got_at in zip(want, got, strict=True) for token, score in want_at.items()
    ]
    spread = rms([score - mean(at.values()) for at in want for score in at.values()])
    error = rms(errors)
    decided = [(w, g) for w, g in zip(want, got, strict=True) if best_gap(w) > ERRORS * error]
    other = sum(best(w) != best(g) for w, g in decided)
    faults = [f"{other} of {len(decided)} positions choose another token, beyond {ERRORS} x the error"] if other else []
    if not error <= LARGEST_ERROR * spread:
        faults.append(f"logits are off by {error:.4f} rms, of a spread of {spread:.3f}")
    if len(decided) < FEWEST_DECIDED * len(want):
        faults.append(f"only {len(decided)} of {len(want)} positions lie further apart than {ERRORS} x the error")
    line = (
        f"{len(decided) - other}/{len(decided)} choices of {len(want)} equal, error {error:.4f} of spread {spread:.2f}"
    )
    return {"line": line, "error": error, "spread": spread, "decided": len(decided), "faults": faults}


def scores(llm: LLM, sequences: list[list[int]]) -> Scores:
    """Log-probabilities of the whole vocabulary after every token but the last."""
    every = SamplingParams(max_tokens=0, prompt_logprobs=VOCABULARY)
    found: Scores = []
    for output in llm.generate(sequences, every):
        entries = (output.prompt_logprobs or [])[1:]
        found += [{token: entry.logprob for token, entry in at.items()} for at in entries if at is not None]
    return found


def parting(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Where two replies part; None when they don't."""
    return next((at for at, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), None)


def best(at: dict[int, float]) -> int:
    """The likeliest token; of a tie the lowest id."""
    return min(at, key=lambda token: (-at[token], token))


def best_gap(at: dict[int, float]) -> float:
    """Between the two likeliest tokens: of log-probabilities and of logits alike."""
    first, second = sorted(at.values(), reverse=True)[:2]
    return first - second


def rms(values: list[float]) -> float:
    return math.sqrt(mean([value * value for value in values]))


def mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
