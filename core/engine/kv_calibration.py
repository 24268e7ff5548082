"""Scales of an int8 KV cache that the checkpoint does not bring: measured once, when the model has been loaded.

    token ids drawn from a seed ──► steps of one request, over a cache that keeps values as they are
    gather_blocks of each layer ──► largest |K| (rotated) and |V| of each head ──► KVScales.fill

Nothing is drawn but by the seed, and how many tokens a step holds does not matter, so a model has the same scales at
every start. Each rank measures the heads it holds. The small caches go when the engine binds its own. Why random ids
do, and the margin: docs/quantization.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.kv import KVCache
from octavo.core.backend.opset import OpSet
from octavo.core.base.params import SamplingParams
from octavo.core.engine.batch import StepInputs
from octavo.core.engine.runner import ModelRunner, RunnerMemory, WantedRows
from octavo.core.layers.cache_specs import cache_spec
from octavo.core.layers.kv_groups import KVGroup, group_layers, layer_places, num_pools, pool_block_bytes
from octavo.core.lora.slots import AdapterSlots
from octavo.core.models.base import Model
from octavo.core.sched.output import ModelRunnerOutput, NewRequest, RunningRequest, SchedulerOutput

MAX_TOKENS = 512
SEED = 20_240_817


def calibrate(
    model: Model,
    backend: DeviceBackend,
    opset: OpSet,
    memory: RunnerMemory,
    *,
    kv_dtype: torch.dtype,
    max_step_tokens: int,
    max_model_len: int,
    adapters: AdapterSlots | None = None,
) -> None:
    """Set the scales that a model's KV cache still needs; nothing happens where it needs none.

    Args:
        model: loaded; it keeps the small caches until it is bound to others.
        memory: the runner's, which no step uses yet.
        kv_dtype: of the cache for the measurement; one that the device lists.
        max_step_tokens, max_model_len: the most tokens of a step, and of a request.
        adapters: the model's adapter slots.
    """
    scales = model.kv_scales()
    if not any(scale is not None and scale.needs_calibration for scale in scales):
        return
    num_tokens = min(MAX_TOKENS, max_model_len)
    groups = group_layers([replace(spec, dtype=kv_dtype) for spec in model.kv_specs()])
    blocks = _blocks_of(groups, num_tokens)
    caches = _bind(model, backend, groups, num_blocks=blocks[-1][-1] + 1)
    runner = ModelRunner(
        model=model,
        backend=backend,
        opset=opset,
        stage=_NoRows(),
        memory=memory,
        pool_views=(),
        max_num_seqs=1,
        max_model_len=num_tokens,
        block_sizes=tuple(group.spec.block_size for group in groups),
        adapters=adapters,
    )
    for step in _steps(model.config.vocab_size, num_tokens, max_step_tokens, blocks):
        runner.execute(step)
    for scale, cache, (group, _) in zip(scales, caches, layer_places(groups), strict=True):
        if scale is not None and scale.needs_calibration:
            scale.fill(*_largest(backend, opset, cache, blocks[group], num_tokens))


class _NoRows:
    """An OutputStage of a step of which only the cache is wanted."""

    def add(self, new: NewRequest) -> None:
        """See OutputStage."""

    def remove(self, request_id: str) -> None:
        """See OutputStage."""

    def wanted(self, inputs: StepInputs) -> WantedRows:
        """See OutputStage."""
        return WantedRows((), None)

    def finish(self, work: Any, rows_RV: torch.Tensor) -> ModelRunnerOutput:
        """See OutputStage."""
        return ModelRunnerOutput()


def _blocks_of(groups: Sequence[KVGroup], num_tokens: int) -> list[tuple[int, ...]]:
    """Blocks of the one request in each group, from 1 on: block 0 is nobody's."""
    blocks, first = [], 1
    for group in groups:
        stop = first - (-num_tokens // group.spec.block_size)
        blocks.append(tuple(range(first, stop)))
        first = stop
    return blocks


def _bind(model: Model, backend: DeviceBackend, groups: Sequence[KVGroup], num_blocks: int) -> list[KVCache]:
    """Give the model's layers caches of their own; they live as long as the model is bound to them."""
    pools = [backend.allocate_kv_pool(num_blocks, pool_block_bytes(groups)) for _ in range(num_pools(groups))]
    places = layer_places(groups)
    caches = [backend.kv_view(pools[pool], groups[group].spec) for group, pool in places]
    model.bind_kv(caches, [group for group, _ in places])
    return caches


def _steps(
    vocab_size: int, num_tokens: int, max_step_tokens: int, blocks: Sequence[tuple[int, ...]]
) -> Iterator[SchedulerOutput]:
    """Steps that compute one request, its ids drawn evenly from the vocabulary."""
    rng = random.Random(SEED)
    new = NewRequest(
        request_id="calibration",
        token_ids=tuple(rng.randrange(vocab_size) for _ in range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling=SamplingParams(),
        choice_index=0,
        end_token_ids=frozenset(),
        block_ids=tuple(blocks),
        num_computed_tokens=0,
        adapter_id=None,
        resumed=False,
        needs_prompt_logprobs=False,
    )
    for start in range(0, num_tokens, max_step_tokens):
        count = min(max_step_tokens, num_tokens - start)
        running = RunningRequest(new.request_id, ((),) * len(blocks), start)
        yield SchedulerOutput(
            step_id=start,
            new_requests=() if start else (new,),
            running=(running,) if start else (),
            num_scheduled_tokens={new.request_id: count},
            finished_request_ids=(),
            preempted_request_ids=(),
            block_copies=(),
            total_num_scheduled_tokens=count,
        )


def _largest(
    backend: DeviceBackend, opset: OpSet, cache: KVCache, blocks: Sequence[int], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest absolute K and V of each head [K], on the host."""
    spec = cache.spec
    gather = opset.bind("gather_blocks", cache_spec(cache, spec.dtype))
    shape = (len(blocks), spec.block_size, spec.num_kv_heads)
    key_nSKD = backend.empty(*shape, spec.head_dim, dtype=spec.dtype)
    value_nSKD = backend.empty(*shape, spec.v_head_dim, dtype=spec.dtype)
    gather(cache, backend.from_host(torch.tensor(blocks, dtype=torch.int64)), out_k=key_nSKD, out_v=value_nSKD)
    largest_k_K, largest_v_K = (
        backend.to_host(x).flatten(0, 1)[:num_tokens].abs().amax(dim=(0, 2)) for x in (key_nSKD, value_nSKD)
    )
    return largest_k_K, largest_v_K
