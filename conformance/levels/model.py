"""Model level: a tiny llama and a tiny gemma3 give the reference's logits through the backend.

    candidate: its ops, weights and KV as it stores them ─┐
                                                          ├─ logits at every position [T, V], within tolerance.py
    reference: the reference ops in fp32 on the host ─────┘

Prompts of 1, 17 and 200 tokens: the least, one more than a block, and many windows and blocks. Each is computed whole
and, where it has more than one token, in chunks that end inside blocks; the reference always computes it whole.
"""

from __future__ import annotations

import functools

import torch

from octavo.conformance.facts import dtype_name
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.levels.check import Check, Measured
from octavo.conformance.levels.stepper import Stepper
from octavo.conformance.levels.tiny import CONFIGS, SPREAD, TinyCheckpoint, prompt
from octavo.conformance.levels.tolerance import allowed, kv_dtype_for
from octavo.conformance.session import Settings
from octavo.core.backend import DeviceBackend

POINTS: tuple[tuple[int, int | None], ...] = ((1, None), (17, None), (17, 5), (200, None), (200, 63))
"""Tokens of a prompt, and of a chunk; None for all at once."""


def checks(backend: DeviceBackend, settings: Settings) -> list[Check]:
    """Every check, family by family and dtype by dtype. Nothing is loaded before the first is measured."""
    made = []
    for family in CONFIGS:
        for dtype, activation_dtype in backend.capabilities.activation_dtype.items():
            pair = _Pair(family, dtype, activation_dtype, backend, settings)
            for tokens, chunk in POINTS:
                how = "whole" if chunk is None else f"chunk{chunk}"
                axes = {"family": family, "weight": dtype_name(dtype), "tokens": str(tokens), "chunk": how}
                check = Check(
                    name=f"model.{family}/{dtype_name(dtype)}-t{tokens}-{how}",
                    level="model",
                    axes=axes,
                    lane="statistical",
                    output="logits",
                    measure=functools.partial(pair.compare, tokens, chunk),
                )
                made.append(check)
    return made


class _Pair:
    """One model on both sides, loaded when first asked for.

    Args:
        dtype: how weights are stored.
        activation_dtype: what the candidate computes in, and the first choice for its KV.
    """

    def __init__(
        self,
        family: str,
        dtype: torch.dtype,
        activation_dtype: torch.dtype,
        backend: DeviceBackend,
        settings: Settings,
    ) -> None:
        self._family = family
        self._dtype = dtype
        self._activation_dtype = activation_dtype
        self._kv_dtype = kv_dtype_for(activation_dtype, backend.capabilities)
        self._backend = backend
        self._settings = settings

    @functools.cached_property
    def _checkpoint(self) -> TinyCheckpoint:
        return TinyCheckpoint(self._family, self._settings.seed, self._dtype)

    @functools.cached_property
    def _candidate(self) -> Stepper:
        return Stepper(
            self._checkpoint, self._backend, dtype=self._dtype, kv_dtype=self._kv_dtype, strict=self._settings.strict
        )

    @functools.cached_property
    def _reference(self) -> Stepper:
        return Stepper(self._checkpoint, HostBackend(), dtype=torch.float32, kv_dtype=torch.float32)

    def compare(self, tokens: int, chunk: int | None) -> Measured:
        """The candidate's logits of a prompt against the reference's."""
        token_ids = prompt(self._family, tokens, self._settings.seed)
        found, expected = self._candidate.logits(token_ids, chunk), self._reference.logits(token_ids)
        error_TV = (found - expected).abs().nan_to_num(nan=torch.inf)
        worst = int(error_TV.argmax())
        return Measured(
            compared=error_TV.numel(),
            share=error_TV.max().item() / (allowed(self._activation_dtype, self._kv_dtype) * SPREAD),
            index=(worst // error_TV.shape[1], worst % error_TV.shape[1]),
            ops=self._candidate.ran(),
            problem="" if found.any() else "logits are all zero",
        )
