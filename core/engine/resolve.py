"""Fills in what a config leaves open, once the checkpoint and the device are known.

    dtype                    "auto": the checkpoint's own floats, else the device's default
    kv_cache_dtype           "auto": as the checkpoint asks, else what models compute in (kv_dtype.py)
    max_model_len            None: the model's limit, or what the KV cache holds when that is less
    max_num_seqs             lowered to the largest step of a device with fixed shapes
    max_num_batched_tokens   None: the device's default, and never below max_num_seqs
    num_kv_blocks            None: from kv_cache_memory_bytes, or a share of the memory that is really free

Pure functions, shared by the engine and `octavo plan`; what the user set is never overwritten, only checked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from octavo.core.backend.device import Capabilities
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.units import format_bytes
from octavo.core.engine.kv_dtype import one_byte_kv
from octavo.core.models.base import ModelConfig
from octavo.core.quant.kv_scheme import KVScheme
from octavo.core.sched.kv_groups import KVGroupSpec, peak_blocks

logger = logging.getLogger(__name__)

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSizes:
    """The types and sizes an engine runs with; nothing in it is open any more.

    Attributes:
        dtype: how weights of products are stored.
        kv_dtype: how keys and values are stored.
        block_size: tokens of a KV block.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of a step.
        max_drawn_rows: rows of logits that a step draws tokens at, guesses included.
        max_model_len: tokens of a prompt and its reply.
        kv_memory_fraction: share of the free memory for the KV cache where no size is given.
        rotary_switch_tokens: as the model's config says it.
        gives_vectors: requests want vectors, and none of them tokens.
        whole_texts: a request is computed in one step, since nothing is kept between steps.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_drawn_rows: int
    max_model_len: int
    kv_memory_fraction: float
    rotary_switch_tokens: int | None
    gives_vectors: bool = False
    whole_texts: bool = False


def resolve_sizes(
    config: EngineConfig,
    checkpoint_config: Mapping[str, Any],
    model: ModelConfig,
    device: Capabilities,
    kv_scheme: KVScheme | None = None,
) -> EngineSizes:
    """Types and sizes from the config, the checkpoint and the device.

    Args:
        kv_scheme: of the KV cache that the checkpoint was calibrated for.

    Raises:
        ConfigError: a dtype or a number of ranks that the device does not have, a length beyond the model, or steps
            too small for the requests.
    """
    if config.tensor_parallel_size not in device.world_sizes:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, but this device works in groups of "
            f"{', '.join(map(str, device.world_sizes))}; give one of these",
            field="tensor_parallel_size",
        )
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for {model.max_position} positions; "
            "lower it",
            field="max_model_len",
        )
    if config.max_num_batched_tokens is not None and config.max_num_batched_tokens < config.max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, below max_num_seqs {config.max_num_seqs}; "
            "raise it or lower max_num_seqs, so that every running request gets a token in every step",
            field="max_num_batched_tokens",
        )
    max_num_seqs = _seqs_of_buckets(config.max_num_seqs, device)
    default_tokens = max(device.default_max_num_batched_tokens, max_num_seqs)
    dtype = _stored_dtype(
        "dtype", config.dtype, tuple(device.activation_dtype), _weight_dtype(checkpoint_config, device)
    )
    return EngineSizes(
        dtype=dtype,
        kv_dtype=_kv_dtype(config, dtype, device, kv_scheme),
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=_tokens_of_buckets(config.max_num_batched_tokens, default_tokens, device),
        max_drawn_rows=max(max_num_seqs, 1 + config.num_speculative_tokens),
        max_model_len=config.max_model_len or model.max_position,
        kv_memory_fraction=config.kv_memory_fraction or device.kv_memory_fraction,
        rotary_switch_tokens=model.rotary_switch_tokens,
    )


def _kv_dtype(config: EngineConfig, dtype: torch.dtype, device: Capabilities, scheme: KVScheme | None) -> torch.dtype:
    one_byte = one_byte_kv(config, scheme, device)
    if one_byte is not None:
        return one_byte
    return _stored_dtype("kv_cache_dtype", config.kv_cache_dtype, device.kv_dtypes, unrounded_kv(dtype, device))


def unrounded_kv(dtype: torch.dtype, device: Capabilities) -> torch.dtype:
    """What models of this storage dtype compute in, so that the cache rounds nothing; else the device's choice."""
    computed = device.activation_dtype[dtype]
    return computed if computed in device.kv_dtypes else device.kv_dtypes[0]


def _seqs_of_buckets(asked: int, device: Capabilities) -> int:
    """max_num_seqs, lowered to the tokens of the largest step where the device's steps are of fixed shapes."""
    largest = device.token_buckets[-1] if device.token_buckets else asked
    if asked > largest:
        logger.warning("max_num_seqs is lowered from %d to %d, the device's largest step", asked, largest)
    return min(asked, largest)


def _tokens_of_buckets(asked: int | None, default: int, device: Capabilities) -> int:
    """max_num_batched_tokens within the device's largest step."""
    if not device.token_buckets:
        return asked or default
    largest = device.token_buckets[-1]
    if asked is not None and asked > largest:
        raise ConfigError(
            f"max_num_batched_tokens is {asked}, but the device's largest step has {largest} tokens; lower it",
            field="max_num_batched_tokens",
        )
    return asked or min(default, largest)


def check_weights_fit(weight_bytes: int, sizes: EngineSizes, free_bytes: int) -> None:
    """Refuse weights that the device has no room for, before any of them is read.

    Raises:
        ConfigError: naming both sizes.
    """
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"the weights take {format_bytes(weight_bytes)} as {str(sizes.dtype).removeprefix('torch.')}, but "
            f"{format_bytes(free_bytes)} are free; free memory, or choose a smaller dtype or model",
            field="model",
        )


def kv_blocks_for(
    config: EngineConfig, sizes: EngineSizes, groups: Sequence[KVGroupSpec], block_bytes: int, free_bytes: int
) -> int:
    """How many KV blocks to allocate, the null block included.

    Args:
        config: says how many blocks, how many bytes or which share of the free memory.
        sizes: bound how many blocks could ever be used.
        groups: the KV groups that share the blocks.
        block_bytes: bytes of one block in all pools together.
        free_bytes: device memory that is free now, weights and workspace loaded.

    Raises:
        ConfigError: the budget does not hold the smallest request, or is more than what is free.
    """
    num_blocks, field, budget = _asked_blocks(config, sizes, block_bytes, free_bytes)
    if config.num_kv_blocks is None:
        num_blocks = min(num_blocks, sizes.max_num_seqs * peak_blocks(groups, sizes.max_model_len) + 1)
    smallest = peak_blocks(groups, 1) + 1
    if num_blocks < smallest:
        raise ConfigError(
            f"{budget} gives {num_blocks} KV blocks of {format_bytes(block_bytes)}, but one token needs {smallest} "
            f"(one of them is reserved); raise {field} or free memory",
            field=field,
        )
    if num_blocks * block_bytes > free_bytes:
        raise ConfigError(
            f"{budget} asks for {format_bytes(num_blocks * block_bytes)} of KV cache, but {format_bytes(free_bytes)} "
            f"are free; lower {field}",
            field=field,
        )
    return num_blocks


def _asked_blocks(config: EngineConfig, sizes: EngineSizes, block_bytes: int, free_bytes: int) -> tuple[int, str, str]:
    """The blocks that the config asks for, the field that says so, and how, in words."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, "num_kv_blocks", f"num_kv_blocks {config.num_kv_blocks}"
    if config.kv_cache_memory_bytes is not None:
        asked_bytes = config.kv_cache_memory_bytes
        return asked_bytes // block_bytes, "kv_cache_memory_bytes", f"kv_cache_memory_bytes {asked_bytes}"
    share = sizes.kv_memory_fraction
    budget = f"kv_memory_fraction {share} of {format_bytes(free_bytes)} free"
    return int(free_bytes * share) // block_bytes, "kv_memory_fraction", budget


def fit_length(config: EngineConfig, sizes: EngineSizes, groups: Sequence[KVGroupSpec], num_blocks: int) -> EngineSizes:
    """Lower an open max_model_len to what the KV cache holds.

    Raises:
        ConfigError: the user set a max_model_len that does not fit.
    """
    fits = longest_that_fits(groups, num_blocks, sizes.max_model_len)
    if fits == sizes.max_model_len:
        return sizes
    if config.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {num_blocks} KV blocks hold {fits} tokens at most; "
            "lower it, or raise num_kv_blocks or kv_cache_memory_bytes",
            field="max_model_len",
        )
    logger.warning("max_model_len is lowered from %d to %d, what the KV cache holds", sizes.max_model_len, fits)
    return replace(sizes, max_model_len=fits)


def longest_that_fits(groups: Sequence[KVGroupSpec], num_blocks: int, at_most: int) -> int:
    """The most tokens, up to `at_most`, of one request alone in `num_blocks` blocks, the null block included."""
    low, high = 0, at_most
    while low < high:
        middle = (low + high + 1) // 2
        if peak_blocks(groups, middle) < num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def _weight_dtype(checkpoint_config: Mapping[str, Any], device: Capabilities) -> torch.dtype:
    """The checkpoint's float type where the device stores it, else the device's default."""
    named = checkpoint_config.get("dtype", checkpoint_config.get("torch_dtype"))
    stored = TORCH_DTYPES.get(str(named).removeprefix("torch."))
    return stored if stored is not None and stored in device.activation_dtype else device.default_dtype


def _stored_dtype(field: str, asked: str, known: Sequence[torch.dtype], default: torch.dtype) -> torch.dtype:
    if asked == "auto":
        return default
    if TORCH_DTYPES[asked] not in known:
        choices = ", ".join(str(dtype).removeprefix("torch.") for dtype in known)
        raise ConfigError(f"{field} is {asked}, which this device does not store; use {choices}", field=field)
    return TORCH_DTYPES[asked]
