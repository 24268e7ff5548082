"""What a worker does otherwise when its model gives vectors: sizes, the pooler's own weights, places of whole texts.

a decoder    sizes and KV cache as ever
an encoder   a step holds whole texts, and nothing is kept after it: the scheduler's only KV group has one block of
             max_model_len tokens and no bytes for each request of a step, which is a place in it and no more
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from octavo.core.backend.device import Capabilities, DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.engine.resolve import EngineSizes
from octavo.core.layers.pool_head import PoolHead
from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.load.stream import WeightTarget, load_weights
from octavo.core.models.base import ModelConfig
from octavo.core.pool.pooler import Pooler
from octavo.core.sched.kv_groups import KVGroupSpec

logger = logging.getLogger(__name__)

STACK_PREFIX = "model."
"""Of a decoder's tensors, in files that hold its head too; files of the stack alone leave it out."""


def pooling_sizes(
    config: EngineConfig, sizes: EngineSizes, pooler: Pooler, model: ModelConfig, device: Capabilities
) -> EngineSizes:
    """The sizes of an engine that gives vectors, from those of one that generates.

    Raises:
        ConfigError: a step that can't hold the longest text, of a model that needs it whole, or tokens to guess.
    """
    if config.num_speculative_tokens:
        raise ConfigError(
            f"num_speculative_tokens is {config.num_speculative_tokens}, but this model gives vectors and no text; "
            "leave it out",
            field="num_speculative_tokens",
        )
    sizes = replace(sizes, gives_vectors=True)
    if config.max_model_len is None and pooler.max_tokens is not None:
        sizes = replace(sizes, max_model_len=min(sizes.max_model_len, pooler.max_tokens))
    if model.kv_specs(sizes.kv_dtype, sizes.block_size):
        return sizes
    largest = device.token_buckets[-1] if device.token_buckets else None
    if config.max_num_batched_tokens is None:
        tokens = max(sizes.max_num_batched_tokens, sizes.max_model_len)
        sizes = replace(sizes, max_num_batched_tokens=tokens if largest is None else min(tokens, largest))
    if sizes.max_model_len > sizes.max_num_batched_tokens:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len is {sizes.max_model_len}, but a step holds {sizes.max_num_batched_tokens} tokens and "
                "this model needs a text whole; lower max_model_len or raise max_num_batched_tokens",
                field="max_model_len",
            )
        logger.warning(
            "max_model_len is lowered from %d to %d, the tokens of a step", sizes.max_model_len,
            sizes.max_num_batched_tokens,
        )  # fmt: skip
        sizes = replace(sizes, max_model_len=sizes.max_num_batched_tokens)
    return replace(sizes, whole_texts=True)


def places_of_texts(sizes: EngineSizes) -> tuple[tuple[KVGroupSpec, ...], int]:
    """KV groups and blocks of a model that keeps nothing: a place for each request of a step, and the null block."""
    return (KVGroupSpec(0, sizes.max_model_len, None, 1),), sizes.max_num_seqs + 1


def build_head(pooler: Pooler, backend: DeviceBackend, opset: OpSet, sizes: EngineSizes) -> PoolHead | None:
    """The pooler's layers, still without weights; None where it has none."""
    if not pooler.layers:
        return None
    return PoolHead(
        backend,
        opset,
        pooler.layers,
        dtype=sizes.dtype,
        activation_dtype=backend.capabilities.activation_dtype[sizes.dtype],
        max_rows=sizes.max_num_seqs,
    )


def load_vectors_model(
    checkpoint: Checkpoint,
    targets: Mapping[str, WeightTarget],
    pooler: Pooler,
    head: PoolHead | None,
    *,
    progress: bool | None,
) -> None:
    """Fill a model without a head and the pooler's layers.

    Raises:
        CheckpointError: see `load_weights`.
    """
    targets = dict(_as_stored(checkpoint, targets))
    if head is not None:
        targets |= head.targets([layer for layer in pooler.layers if layer.folder is None])
    load_weights(checkpoint, targets, progress=progress, left_out=_of_other_heads(checkpoint, targets))
    for layer in pooler.layers:
        if head is not None and layer.folder is not None:
            dense = open_checkpoint(ModelSource(layer.name, layer.folder, "safetensors"))
            try:
                load_weights(dense, head.targets([layer]), progress=False)
            finally:
                dense.close()


def _as_stored(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> Mapping[str, WeightTarget]:
    """The targets under the names in the file: of the stack alone, or of a whole model that the config does not tell.

    The first target is the word embedding's, which every file has; what its name has before it all others have too.
    """
    names = checkpoint.names()
    first = next(iter(targets))
    bare = first.removeprefix(STACK_PREFIX)
    found = [name for name in names if name == bare or name.endswith(f".{bare}")]
    if first in names or len(found) != 1:
        return targets
    prefix = found[0].removesuffix(bare)
    return {prefix + name.removeprefix(STACK_PREFIX): target for name, target in targets.items()}


def _of_other_heads(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> set[str]:
    """Tensors of a head that this model is used without, and buffers: nothing that anybody would miss."""
    parts = ("pooler.dense.", "lm_head.", "cls.", "embeddings.position_ids")
    return {name for name in checkpoint.names() if name not in targets and any(part in name for part in parts)}


def table_offset(sizes: EngineSizes, model: ModelConfig) -> int:
    """What is added to positions in the second text of a pair: where in the position table its rows begin."""
    return model.max_position if sizes.whole_texts else 0


def num_rows(sizes: EngineSizes, pooler: Pooler, step_tokens: int) -> int:
    """The most rows that a step wants."""
    return step_tokens if pooler.kind == "mean" else sizes.max_num_seqs
