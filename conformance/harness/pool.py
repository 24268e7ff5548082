"""A KV pool on the device: poison everywhere, then the named blocks; and the proof that nothing else was written.

    host image  key [n, S, K, D], value [n, S, K, Dv] of n tracked blocks (all of them; the named ones if lazy)

Bytes go through the backend's own torch views where it has them, else through its scatter_blocks and gather_blocks.
A lazy pool is never filled, so that terabytes of address space cost only the pages of the named blocks. What lies
between and around the blocks is surround.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.conformance.harness.poison import Poison, same_bits
from octavo.conformance.harness.surround import Surroundings
from octavo.conformance.trial import HostPool
from octavo.core.backend import CacheSpec, DeviceBackend, KVCache, OpSet


class PoolOnDevice:
    """A host pool's copy on the device.

    Attributes:
        kv: the view that ops are given.
    """

    def __init__(self, pool: HostPool, backend: DeviceBackend, opset: OpSet, poison: Poison) -> None:
        self.pool = pool
        self._backend = backend
        self._opset = opset
        spec = pool.spec
        self._around = Surroundings(backend, spec, pool.num_blocks, spec.block_bytes + pool.pad_bytes)
        self.kv: KVCache = self._around.kv
        self._ids = pool.block_ids if pool.is_lazy else list(range(pool.num_blocks))
        shape = (len(self._ids), spec.block_size, spec.num_kv_heads)
        self._key = poison.filled((*shape, spec.head_dim), spec.dtype)
        self._value = poison.filled((*shape, spec.v_head_dim), spec.dtype)
        rows = {block: row for row, block in enumerate(self._ids)}
        S = spec.block_size
        self._written = [(rows[slot // S], slot % S) for slot in sorted(pool.written)]
        for block, content in pool.blocks.items():
            if content is not None:
                for image, part in zip((self._key, self._value), content, strict=True):
                    image[rows[block], : part.shape[0]].copy_(part)
        self._around.fill(poison, self._ids if pool.is_lazy else None)
        self._write()

    def read(self) -> tuple[dict[str, torch.Tensor], list[str]]:
        """What the written slots hold now, and what was changed that must not be."""
        outputs, faults = {}, []
        for part, before, after in zip(("key", "value"), (self._key, self._value), self._gather(), strict=True):
            name = f"{self.pool.name}.{part}"
            changed = ~same_bits(before, after).flatten(2).all(dim=-1)
            may_change = set(self._written)
            bad = [at for row, slot in changed.nonzero().tolist() if (at := (row, slot)) not in may_change]
            if bad:
                where = ", ".join(f"block {self._ids[row]} slot {slot}" for row, slot in bad[:3])
                faults.append(f"{name}: {len(bad)} slots were overwritten that must not be: {where}")
            if self._written:
                outputs[name] = torch.stack([after[at] for at in self._written])
        if around := self._around.changed():
            faults.append(
                f"{self.pool.name}: {len(around)} bytes between or around its blocks were overwritten, "
                f"bytes {around[0]} to {around[-1]} from the first block's first"
            )
        return outputs, faults

    def _write(self) -> None:
        key, value = self.kv.key_NSKD, self.kv.value_NSKD
        device_key, device_value = (
            self._backend.from_host(self._key.clone()),
            self._backend.from_host(self._value.clone()),
        )
        if key is None or value is None:
            ids = self._backend.from_host(torch.tensor(self._ids, dtype=torch.int64))
            self._bound("scatter_blocks")(self.kv, ids, device_key, device_value)
            return
        if not self.pool.is_lazy:
            key.copy_(device_key)
            value.copy_(device_value)
            return
        for row, block in enumerate(self._ids):
            key[block].copy_(device_key[row])
            value[block].copy_(device_value[row])

    def _gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = self.kv.key_NSKD, self.kv.value_NSKD
        out_key = self._backend.empty(*self._key.shape, dtype=self._key.dtype)
        out_value = self._backend.empty(*self._value.shape, dtype=self._value.dtype)
        if key is None or value is None:
            ids = self._backend.from_host(torch.tensor(self._ids, dtype=torch.int64))
            self._bound("gather_blocks")(self.kv, ids, out_k=out_key, out_v=out_value)
        elif not self.pool.is_lazy:
            out_key.copy_(key)
            out_value.copy_(value)
        else:
            for row, block in enumerate(self._ids):
                out_key[row].copy_(key[block])
                out_value[row].copy_(value[block])
        self._backend.synchronize()
        return self._backend.to_host(out_key), self._backend.to_host(out_value)

    def _bound(self, op: str) -> Callable[..., Any]:
        spec = self.pool.spec
        return self._opset.bind(
            op,
            CacheSpec(
                spec.num_kv_heads,
                spec.head_dim,
                spec.v_head_dim,
                spec.dtype,
                spec.dtype,
                spec.block_size,
                self.kv.layout,
            ),
        )
