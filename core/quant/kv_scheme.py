"""What a checkpoint says of the KV cache that it was calibrated for: `quantization_config.kv_cache_scheme`.

    compressed-tensors   {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false, "symmetric": true}
    AutoFP8              "static"

It says how the scales among the checkpoint's tensors are meant: x / scale is a code of that type. A cache of another
type takes them rescaled, so that the largest value stays the largest code. The scheme concerns no weight: where it
can't be used the checkpoint loads all the same, and the engine says why its scales are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.quant.settings import Settings

LARGEST_FP8 = 448.0
"""Of e4m3fn, the flavour in which checkpoints are written."""
LARGEST_INT8 = 127.0

_INERT = {
    "observer": "how scales were found",
    "observer_kwargs": "how scales were found",
    "scale_dtype": "shows in the files",
    "zp_dtype": "shows in the files",
}


@dataclass(frozen=True, slots=True)
class KVScheme:
    """A checkpoint's KV cache.

    Attributes:
        is_float: codes are 8-bit floats; else int8.
        refusal: why its scales can't be used; empty where they can.
    """

    is_float: bool = True
    refusal: str = ""

    @property
    def option(self) -> str:
        """The value of kv_cache_dtype that stores KV so."""
        return "fp8" if self.is_float else "int8"

    @property
    def largest_code(self) -> float:
        """What the largest value becomes, divided by its scale."""
        return LARGEST_FP8 if self.is_float else LARGEST_INT8


def read_kv_scheme(config: Any) -> KVScheme | None:
    """The scheme of a `quantization_config`; None where it names none."""
    value = config.get("kv_cache_scheme") if isinstance(config, Mapping) else None
    if not value:
        return None
    if isinstance(value, str):
        return KVScheme(refusal="" if value in ("static", "dynamic") else f"kv_cache_scheme {value!r} is not known")
    if not isinstance(value, Mapping):
        return KVScheme(refusal=f"kv_cache_scheme is {value!r}, no object")
    is_float = value.get("type") == "float"
    try:
        _check(Settings(value, "quantization_config.kv_cache_scheme."))
    except CheckpointError as error:
        return KVScheme(is_float, str(error))
    return KVScheme(is_float)


def _check(settings: Settings) -> None:
    """Raise CheckpointError unless codes have 8 bits and no zero points, and scales are of a tensor or a head."""
    settings.choice("type", ("int", "float"), "int")
    if settings.integer("num_bits", 8) != 8:
        raise settings.refuse("num_bits", "KV of 8 bits can be stored")
    if not settings.flag("symmetric", True):
        raise settings.refuse("symmetric", "zero points of KV are not implemented")
    settings.choice("strategy", ("tensor", "attn_head"), "tensor")
    settings.any_of("dynamic")  # then there are no scales among the tensors
    settings.finish(_INERT)
