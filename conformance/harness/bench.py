"""The device side of one attempt: a trial's tensors, weights and pools on the device, by name, and the op to call.

    trial ──► Bench ──► bench.op(…)(bench["x"], bench.weight("w"), out=bench["out"])   in the trial's `run`
                  └──► read(): everything back on the host, and what was touched that must not be

A trial's `run` is the only code that sees a Bench; it must use nothing but its public methods. Ops are bound through
OpSet, as the engine binds them, so that what ran (own, composite, fallback) is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from octavo.conformance.harness.buffer import GuardedBuffer
from octavo.conformance.harness.poison import Poison
from octavo.conformance.harness.pool import PoolOnDevice
from octavo.conformance.trial import HostWeight, Role, Trial
from octavo.core.backend import (
    AttentionMetadata,
    AttentionSpec,
    CacheSpec,
    Communicator,
    DeviceBackend,
    GemmSpec,
    KVCache,
    OpChoice,
    OpSet,
    OpSpec,
    PackedWeight,
    QuantizedTensor,
    StepPlan,
)


class Bench:
    """One attempt's device side.

    Attributes:
        backend: for what has no name here: events, programs, models. Never for reading results.
        opset: for models, which bind their own ops.
        strict, options: of `--strict-backend` and `--backend-option`, for an engine that makes the backend once more.
        ran: what such an engine bound, written by the trial's `run`.
        weights: packed, by name; for the next attempt, which uses them again.
    """

    def __init__(
        self,
        trial: Trial,
        backend: DeviceBackend,
        poison: Poison,
        *,
        strict: bool = False,
        options: Mapping[str, str] | None = None,
        group: Communicator | None = None,
        weights: Mapping[str, PackedWeight] | None = None,
    ) -> None:
        """
        Args:
            weights: the trial's, as an earlier attempt packed and used them; None packs them anew.
        """
        self.backend = backend
        self._group = group
        self.opset = opset = OpSet(backend, strict=strict)
        self.strict = strict
        self.options = dict(options or {})
        self.ran: list[OpChoice] = []
        self._poison = poison
        self._buffers = {t.name: GuardedBuffer(t, backend, poison) for t in trial.tensors}
        self._pools = {p.name: PoolOnDevice(p, backend, opset, poison) for p in trial.pools}
        self.weights = {w.name: self._place(w) for w in trial.weights} if weights is None else dict(weights)
        self._looked_up = next((w.spec for w in trial.weights if isinstance(w.spec, GemmSpec)), None)
        backend.synchronize()

    # -- for a trial's run ------------------------------------------------------------------------------------
    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor of the trial, on the device."""
        return self._buffers[name].view

    def weight(self, name: str) -> PackedWeight:
        return self.weights[name]

    def kv(self, name: str) -> KVCache:
        return self._pools[name].kv

    def op(self, op: str, spec: OpSpec) -> Callable[..., Any]:
        """The op as the engine would call it. A KV layout in the spec is replaced by the backend's own."""
        # Contiguous keys lie in no pool, whatever pools the trial has besides.
        where = spec if op == "attention" else self.localized(spec)
        return self.opset.bind(op, where, product=self._looked_up if op == "embed" else None)

    def localized(self, spec: OpSpec) -> OpSpec:
        """The spec with the layout in which this backend keeps the trial's pools."""
        if isinstance(spec, AttentionSpec | CacheSpec) and self._pools:
            return replace(spec, layout=next(iter(self._pools.values())).kv.layout)
        return spec

    def metadata(
        self,
        *,
        num_requests: int,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        block_size: int,
        prefix: str = "",
    ) -> AttentionMetadata:
        """Metadata over the trial's tensors query_start_loc, seq_lens, block_table and slot_mapping."""
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        starts, lengths, table, slots = (self[prefix + name] for name in names)
        return AttentionMetadata(
            num_requests, num_tokens, max_query_len, max_seq_len, starts, lengths, table, slots, block_size
        )

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        return self.opset.plan(meta)

    def communicator(self) -> Communicator:
        """The communicator of the case's group, or of a group of one."""
        return self.backend.communicator(0, 1, "") if self._group is None else self._group

    # -- for the attempt --------------------------------------------------------------------------------------
    def read(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """All outputs on the host, and the faults that reading them brought to light."""
        self.backend.synchronize()
        outputs: dict[str, torch.Tensor] = {}
        faults: list[str] = []
        for name, buffer in self._buffers.items():
            elements, damage = buffer.read(self.backend)
            faults += damage
            if buffer.tensor.role is not Role.GIVEN:
                outputs[name] = elements
                if self._poison is Poison.HUGE and (missing := buffer.unwritten(elements, self._poison)):
                    faults.append(f"{name}: {missing} of {elements.numel()} elements were never written")
        for pool in self._pools.values():
            blocks, damage = pool.read()
            outputs |= blocks
            faults += damage
        return outputs, faults

    def _place(self, weight: HostWeight) -> PackedWeight:
        packed = self.opset.prepare_weight(weight.spec)
        for part, row in weight.parts:
            packed.place(_copied(part), row)
        return packed


def _copied(part: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    """The candidate packs copies: what it does to them must not reach the oracle."""
    if isinstance(part, torch.Tensor):
        return part.clone()
    zero_points = None if part.zero_points is None else part.zero_points.clone()
    return QuantizedTensor(part.scheme, part.codes_NK.clone(), part.scales.clone(), zero_points)
