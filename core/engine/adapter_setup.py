"""The adapter slots of a worker, as the config asks for them."""

from __future__ import annotations

import sys

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.base.config import EngineConfig
from octavo.core.engine.resolve import EngineSizes
from octavo.core.lora.adapter import directory_of, read_settings
from octavo.core.lora.slots import AdapterSlots

SMALLEST_MAX_RANK = 16
"""Of the slots of an engine that is not told how large adapters are."""


def make_slots(
    config: EngineConfig, sizes: EngineSizes, backend: DeviceBackend, opset: OpSet, *, max_tokens: int, num_ranks: int
) -> AdapterSlots | None:
    """Empty slots; None where the engine serves no adapters.

    Args:
        max_tokens: of a step, padding included.
        num_ranks: over which the model is split. Reading an adapter again may fail on one of them and not on another,
            so that each then keeps a copy of its part of every adapter.

    Raises:
        CheckpointError: the config of one of lora_modules can't be read.
    """
    if not config.serves_adapters:
        return None
    max_rank = config.max_lora_rank
    if max_rank is None:
        named = [read_settings(directory_of(path)).max_rank for path in config.lora_modules.values()]
        max_rank = max([SMALLEST_MAX_RANK, *named])
    return AdapterSlots(
        backend,
        opset,
        dtype=backend.capabilities.activation_dtype[sizes.dtype],
        max_tokens=max_tokens,
        max_loras=config.max_loras,
        max_lora_rank=max_rank,
        max_cpu_loras=config.max_cpu_loras if num_ranks == 1 else sys.maxsize,
        demands_own_by=next((name for name in ("deterministic", "strict_backend") if getattr(config, name)), None),
    )
