"""`octavo plan`: what fits in memory, worked out from the checkpoint's header and the device's facts alone.

    total budget = free memory now
      weights        every parameter once, in the type it will be stored in
      KV cache       kv_blocks_for(), the engine's own rule, on what the weights leave
        per token    bytes over all layers
        requests     how many of a given length fit at once, windows counted

No weight is read and nothing is allocated on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.backend.opset import OpSet
from octavo.core.base.config import EngineConfig
from octavo.core.base.units import format_bytes
from octavo.core.engine.loading import open_model
from octavo.core.engine.pooling_setup import places_of_texts, pooling_sizes
from octavo.core.engine.resolve import EngineSizes, fit_length, kv_blocks_for, longest_that_fits, resolve_sizes
from octavo.core.engine.weight_sizes import has_product_for, model_bytes, quantised_formats
from octavo.core.engine.worker import make_backend, scheduler_groups
from octavo.core.layers.kv_groups import group_layers, num_pools, pool_block_bytes
from octavo.core.models.header import check_header
from octavo.core.models.registry import read_config
from octavo.core.parallel.mesh import Place
from octavo.core.parallel.shard import Shard
from octavo.core.pool.read import read_pooler
from octavo.core.quant.open import open_quantized
from octavo.core.sched.kv_groups import KVGroupSpec, peak_blocks

LENGTHS_TOKENS = (128, 512, 2048, 8192, 32768, 131072)
"""Request lengths that a plan counts, as far as the model goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a model needs and what a device has.

    Attributes:
        model, device: for people.
        dtype, kv_dtype: how plain weights and KV are stored.
        quantised: formats of the layers that are not plain.
        num_devices: that share the model; all figures in bytes are of one of them.
        weight_bytes: all parameters, each once, or a device's part of them.
        free_bytes, total_bytes: of the device, now.
        kv_bytes_per_token: over all layers, where no window has closed yet.
        block_size: tokens of a block.
        num_kv_blocks: blocks the engine would allocate; kv_bytes: their bytes.
        max_model_len: the longest request; model_limit: what the checkpoint was made for.
        concurrency: (length in tokens, requests of that length that run at once: what fits, max_num_seqs at most).
    """

    model: str
    device: str
    dtype: str
    quantised: Sequence[str]
    kv_dtype: str
    num_devices: int
    weight_bytes: int
    free_bytes: int
    total_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_kv_blocks: int
    kv_bytes: int
    max_model_len: int
    model_limit: int
    concurrency: Sequence[tuple[int, int]]

    @property
    def fits(self) -> bool:
        """Whether the weights fit the free memory at all."""
        return self.weight_bytes < self.free_bytes

    @property
    def _kv_cache(self) -> str:
        if not self.kv_bytes_per_token:
            return "none: texts are computed whole"
        return f"{self.num_kv_blocks} blocks of {self.block_size} tokens, {format_bytes(self.kv_bytes)}"

    def __str__(self) -> str:
        free = f"{format_bytes(self.free_bytes)} free of {format_bytes(self.total_bytes)}"
        rows = [
            ("model", self.model),
            ("device", f"{self.device}, {free}"),
            *([("over", f"{self.num_devices} devices; every figure is of each")] if self.num_devices > 1 else []),
            ("weights", f"{format_bytes(self.weight_bytes)} as {' and '.join((*self.quantised, self.dtype))}"),
            ("KV per token", f"{format_bytes(self.kv_bytes_per_token)} as {self.kv_dtype}"),
            ("KV cache", self._kv_cache),
            ("longest request", f"{self.max_model_len} tokens (the model's limit: {self.model_limit})"),
            *((f"at {length} tokens", f"{count} requests at once") for length, count in self.concurrency),
        ]
        if not self.fits:
            rows.append(
                ("verdict", "the weights do not fit; try --quantization int8 or int4, a smaller model or more memory")
            )
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def plan_model(config: EngineConfig) -> Plan:
    """Work out what fits.

    Weights that do not fit are no error but a plan without KV cache.

    Raises:
        UserError: the model, the backend or the budget is at fault.
    """
    size = config.tensor_parallel_size
    backend = make_backend(config, Place(0, size))
    try:
        memory, capabilities = backend.memory_info(), backend.capabilities
        with open_model(config) as files:
            opset = OpSet(backend)
            multiplies = has_product_for(opset, capabilities)
            checkpoint, formats = open_quantized(files, config.quantization, multiplies=multiplies)
            facts = read_config(checkpoint.config)
            check_header(checkpoint, facts)
            sizes = resolve_sizes(config, checkpoint.config, facts, capabilities, formats.kv_scheme)
            pooler = read_pooler(checkpoint.config, checkpoint.path, config.pooling)
            if pooler is not None:
                sizes = pooling_sizes(config, sizes, pooler, facts, capabilities)
            stored_bytes = model_bytes(
                checkpoint, formats, opset, dtype=sizes.dtype, device=capabilities, num_ranks=size
            )
            quantised = quantised_formats(checkpoint, formats)
    finally:
        backend.close()
    kv_specs = facts.kv_specs(sizes.kv_dtype, sizes.block_size, Shard.planned(size))
    layers = group_layers(kv_specs)
    groups = scheduler_groups(layers)
    block_bytes = pool_block_bytes(layers) * num_pools(layers)
    left_bytes = memory.free_bytes - stored_bytes
    num_blocks, max_model_len = 0, 0
    if left_bytes > 0 and sizes.whole_texts:
        (groups, num_blocks), max_model_len = places_of_texts(sizes), sizes.max_model_len
    elif left_bytes > 0:
        num_blocks = kv_blocks_for(config, sizes, groups, block_bytes, left_bytes)
        max_model_len = fit_length(config, sizes, groups, num_blocks).max_model_len
    return Plan(
        model=config.model,
        device=capabilities.device_name,
        dtype=str(sizes.dtype).removeprefix("torch."),
        quantised=quantised,
        kv_dtype=str(sizes.kv_dtype).removeprefix("torch."),
        num_devices=size,
        weight_bytes=stored_bytes,
        free_bytes=memory.free_bytes,
        total_bytes=memory.total_bytes,
        kv_bytes_per_token=sum(spec.token_bytes for spec in kv_specs),
        block_size=sizes.block_size,
        num_kv_blocks=0 if sizes.whole_texts else num_blocks,
        kv_bytes=num_blocks * block_bytes,
        max_model_len=max_model_len,
        model_limit=facts.max_position,
        concurrency=_concurrency(sizes, groups, num_blocks),
    )


def _concurrency(sizes: EngineSizes, groups: Sequence[KVGroupSpec], num_blocks: int) -> list[tuple[int, int]]:
    """How many requests of each length run at once: by the blocks they hold, and where texts are computed whole by
    the tokens of a step."""
    longest = longest_that_fits(groups, num_blocks, sizes.max_model_len)
    counts = []
    for length in (length for length in LENGTHS_TOKENS if length <= longest):
        count = min(sizes.max_num_seqs, (num_blocks - 1) // peak_blocks(groups, length))
        counts.append((length, min(count, sizes.max_num_batched_tokens // length) if sizes.whole_texts else count))
    return counts
