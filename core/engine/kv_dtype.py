"""How keys and values are stored: from `kv_cache_dtype`, the checkpoint and the device.

    auto      what the checkpoint was calibrated for, where the device lists it; else what models compute in
    fp8       the device's flavour of 8-bit floats, e4m3fn where it has none
    int8      with scales, from the checkpoint or calibrated (kv_calibration.py)
    others    if the device lists them

Caches of one byte need nothing of a device but that torch can read its memory: the reference ops fill in for its own.
"""

from __future__ import annotations

import logging

import torch

from octavo.core.backend.device import Capabilities
from octavo.core.backend.kv import KVCache
from octavo.core.backend.selfcheck import FP8_FLAVOURS
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.quant.kv_scheme import KVScheme

logger = logging.getLogger(__name__)


def one_byte_dtype(name: str, device: Capabilities) -> torch.dtype:
    """What "fp8" or "int8" is on a device."""
    return torch.int8 if name == "int8" else FP8_FLAVOURS.get(device.fp8) or torch.float8_e4m3fn


def one_byte_kv(config: EngineConfig, scheme: KVScheme | None, device: Capabilities) -> torch.dtype | None:
    """The type of a cache of one byte per element, where one is asked for; None: values are kept as they are.

    Raises:
        ConfigError: replies must not depend on their batch, which the device promises of its own ops alone.
    """
    asked = config.kv_cache_dtype
    if asked not in ("fp8", "int8", "auto"):
        return None
    if asked == "auto":
        return _of_checkpoint(scheme, device)
    dtype = one_byte_dtype(asked, device)
    if config.deterministic and dtype not in device.kv_dtypes:
        raise ConfigError(
            f"kv_cache_dtype is {asked}, for which this device has no ops of its own, and deterministic holds for "
            "those alone; leave out one of them",
            field="kv_cache_dtype",
        )
    if scheme is not None and scheme.refusal:
        logger.warning("the checkpoint's scales of the KV cache are not used: %s", scheme.refusal)
    return dtype


def _of_checkpoint(scheme: KVScheme | None, device: Capabilities) -> torch.dtype | None:
    """What a checkpoint was calibrated for, if the device has ops for it."""
    if scheme is None:
        return None
    dtype = one_byte_dtype(scheme.option, device)
    if dtype in device.kv_dtypes and not scheme.refusal:
        return dtype
    logger.info(
        "the checkpoint's kv_cache_scheme is passed over (%s); kv_cache_dtype %s stores KV in one byte all the same",
        scheme.refusal or f"this device has no ops of its own for {scheme.option} KV",
        scheme.option,
    )
    return None


def check_readable(view: KVCache, device: Capabilities) -> None:
    """Refuse a cache that neither the device's ops nor the reference's can read.

    Raises:
        ConfigError: the device's memory is not torch's, and it does not list the type.
    """
    if view.key_NSKD is None and view.spec.dtype not in device.kv_dtypes:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in device.kv_dtypes)
        raise ConfigError(
            f"kv_cache_dtype is {str(view.spec.dtype).removeprefix('torch.')}, but this device keeps only {choices}, "
            "and no other op can read its memory; use auto",
            field="kv_cache_dtype",
        )
