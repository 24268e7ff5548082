"""Model level: a tiny model of each family gives the reference's logits through the backend.

    candidate: its ops, weights and KV as it stores them ── logits at every position [T, V] ─┐
                                                                                             ├─ within tolerance.py
    judge: the reference ops in fp32 on the host, from weights of its own drawing ───────────┘

Prompts of 1, 17 and 200 tokens: the least, one more than a block, and many windows and blocks. Each is computed whole
and, where it has more than one token, in chunks that end inside blocks; the reference always computes it whole.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.conformance.case import Case, stores_weights_in
from octavo.conformance.draw import Draw
from octavo.conformance.facts import dtype_name
from octavo.conformance.finding import Finding
from octavo.conformance.harness.bench import Bench
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.levels.stepper import Stepper
from octavo.conformance.levels.tiny import CONFIGS, SPREAD, TinyCheckpoint, drawn_seed, prompt
from octavo.conformance.levels.tolerance import activation_dtype, allowed, kv_dtype_for
from octavo.conformance.trial import Outputs, Trial, wanted
from octavo.core.backend import OpSet

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""How weights are stored, where a backend stores them so."""

LENGTHS: tuple[tuple[int, int | None], ...] = ((1, None), (17, None), (17, 5), (200, None), (200, 63))
"""Tokens of a prompt, and of a chunk; None for all at once."""


@dataclass(frozen=True)
class Point:
    """One model, stored in one dtype, and one prompt."""

    family: str
    dtype: torch.dtype
    tokens: int
    chunk: int | None

    @property
    def how(self) -> str:
        return "whole" if self.chunk is None else f"chunk{self.chunk}"

    @property
    def name(self) -> str:
        return f"model.{self.family}/{dtype_name(self.dtype)}-t{self.tokens}-{self.how}"

    @property
    def axes(self) -> dict[str, str]:
        return {
            "family": self.family,
            "weight": dtype_name(self.dtype),
            "tokens": str(self.tokens),
            "chunk": self.how,
        }


def cases() -> Iterable[Case]:
    points = [Point(family, dtype, *length) for family in CONFIGS for dtype in DTYPES for length in LENGTHS]
    for point in points:
        yield Case(
            name=point.name,
            op="model",
            spec=None,
            axes=point.axes,
            lanes=("statistical",),
            build=functools.partial(build, point),
            profiles=frozenset({"model"}),
            requires=stores_weights_in(point.dtype),
        )


def build(point: Point, draw: Draw) -> Trial:
    """Nothing is drawn or loaded before it is needed: the candidate never computes what the judge compares with."""
    seed = drawn_seed(draw)
    computes_in = activation_dtype(draw.facts, point.dtype)
    kv_dtype = kv_dtype_for(computes_in, draw.facts)
    token_ids = prompt(point.family, point.tokens, seed)

    def run(bench: Bench) -> None:
        checkpoint = TinyCheckpoint(point.family, seed, point.dtype)
        candidate = Stepper(checkpoint, bench.backend, bench.opset, dtype=point.dtype, kv_dtype=kv_dtype)
        bench.backend.from_host(candidate.logits(token_ids, point.chunk), out=bench["logits"])

    def check(outputs: Outputs) -> list[Finding]:
        checkpoint, host = TinyCheckpoint(point.family, seed, point.dtype), HostBackend()
        reference = Stepper(checkpoint, host, OpSet(host), dtype=torch.float32, kv_dtype=torch.float32)
        found, expected = outputs["logits"], reference.logits(token_ids)
        error_TV = (found - expected).abs().nan_to_num(nan=torch.inf)
        worst = int(error_TV.argmax())
        finding = Finding(
            lane="statistical",
            output="logits",
            compared=error_TV.numel(),
            share=error_TV.max().item() / (allowed(computes_in, kv_dtype) * SPREAD),
            index=(worst // error_TV.shape[1], worst % error_TV.shape[1]),
        )
        return [finding]

    logits = wanted("logits", (point.tokens, CONFIGS[point.family]["vocab_size"]), torch.float32)
    return Trial((logits,), run, check)
