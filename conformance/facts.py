"""What a backend declares about itself, as plain values: in every report, and the only thing a case may depend on.

    Capabilities (torch dtypes, live object)  ──Facts.of──►  Facts (strings and numbers, JSON-able)

Whoever computes the oracle needs the declared accumulation class but must not hold the backend, which may live in
another process: Facts cross that border. What a backend doesn't declare is never guessed.
"""

from __future__ import annotations

import msgspec
import torch

from octavo.core.backend import Capabilities


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """A backend's Capabilities. Dtypes go by torch's names ("bfloat16").

    Attributes:
        activations: dtypes that models compute in.
        weights: dtypes that plain weights are stored in.
        computes: of each of these, what models compute in.
        world_sizes: groups of ranks that it forms on this machine.
        is_emulated: another device does its work.
        versions: of drivers and the like, as the backend names them.
    """

    device_name: str
    arch: str
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    fp8: str | None
    graphs: bool
    dynamic_shapes: bool
    token_buckets: tuple[int, ...]
    accumulation: dict[str, str]
    deterministic: bool
    batch_invariant: bool
    total_memory_bytes: int
    versions: dict[str, str]
    computes: dict[str, str] = {}
    world_sizes: tuple[int, ...] = (1,)
    is_emulated: bool = False

    @classmethod
    def of(cls, capabilities: Capabilities) -> Facts:
        """The facts of a live backend."""
        names = {weight: dtype_name(dtype) for weight, dtype in capabilities.activation_dtype.items()}
        return cls(
            device_name=capabilities.device_name,
            arch=capabilities.arch,
            activations=tuple(sorted(set(names.values()))),
            weights=tuple(sorted(dtype_name(weight) for weight in names)),
            kv_dtypes=tuple(dtype_name(dtype) for dtype in capabilities.kv_dtypes),
            fp8=capabilities.fp8,
            graphs=capabilities.graphs,
            dynamic_shapes=capabilities.dynamic_shapes,
            token_buckets=capabilities.token_buckets,
            accumulation=dict(capabilities.accumulation),
            deterministic=capabilities.deterministic,
            batch_invariant=capabilities.batch_invariant,
            total_memory_bytes=capabilities.total_memory_bytes,
            versions=dict(capabilities.versions),
            world_sizes=capabilities.world_sizes,
            is_emulated=capabilities.is_emulated,
            computes={dtype_name(weight): name for weight, name in names.items()},
        )

    def accumulation_of(self, op: str) -> str:
        """The accumulation class of an op or of "op/float8", where nothing is said the plain op's; else fp32."""
        names = (op, op.partition("/")[0], "default")
        return next((self.accumulation[name] for name in names if name in self.accumulation), "fp32")
