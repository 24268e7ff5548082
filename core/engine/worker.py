"""One device's share of an engine: its backend, its model's weights, its KV pools, its runner.

    Worker(config, checkpoint, place)
      backend chosen and made, ops bound        BackendRegistry, OpSet
      group formed, where it is one of several  backend.communicator
      model built, weights streamed in          build_model, load_weights
      adapters of the start read in             AdapterSlots
      the runner's buffers allocated            RunnerMemory
      scales of an int8 KV cache measured       calibrate
      pools allocated from what is really free  kv_blocks_for
      runner made                               ModelRunner

A worker is also the executor of a one-device engine: `execute` runs a step. `close` gives everything back. In a group
every rank has a worker in a process of its own (rank_process.py), and all of them come to the same sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from octavo.core.backend.comm import Communicator
from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.kv import KVCache, KVPool
from octavo.core.backend.opset import OpChoice, OpSet
from octavo.core.backend.registry import BackendInfo, BackendRegistry, load_layer_overrides
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import BackendUnavailable
from octavo.core.engine.adapter_setup import make_slots
from octavo.core.engine.buckets import padded_tokens
from octavo.core.engine.follower_stage import FollowerStage
from octavo.core.engine.kv_calibration import calibrate
from octavo.core.engine.kv_dtype import check_readable
from octavo.core.engine.pooling_setup import (
    build_head,
    load_vectors_model,
    num_rows,
    places_of_texts,
    pooling_sizes,
    table_offset,
)
from octavo.core.engine.pooling_stage import PoolingStage
from octavo.core.engine.resolve import (
    EngineSizes,
    check_weights_fit,
    fit_length,
    kv_blocks_for,
    resolve_sizes,
    unrounded_kv,
)
from octavo.core.engine.runner import ModelRunner, OutputStage, RunnerMemory
from octavo.core.engine.sampling_stage import SamplingStage
from octavo.core.engine.weight_sizes import has_product_for, model_bytes
from octavo.core.layers.kv_groups import KVGroup, group_layers, layer_places, num_pools, pool_block_bytes
from octavo.core.layers.overrides import replaced_layers
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.stream import load_weights
from octavo.core.lora.slots import AdapterFacts, AdapterSlots
from octavo.core.models.base import Model
from octavo.core.models.header import check_header
from octavo.core.models.registry import build_model, read_config
from octavo.core.parallel.mesh import Place
from octavo.core.parallel.shard import Shard
from octavo.core.pool.pooler import Pooler
from octavo.core.pool.read import read_pooler
from octavo.core.quant.formats import WeightFormats
from octavo.core.quant.open import open_quantized
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput

WHOLE = Place()
"""Of a process that has a model to itself."""


class Worker:
    """A model on a device, ready to run steps.

    Args:
        config: as the user gave it.
        checkpoint: opened; only read.
        place: in the group that shares the model; by default it is whole.

    Attributes:
        sizes: what the config left open is filled in.
        vocab_size: width of the logits.
        kv_groups, num_kv_blocks: what the scheduler has to know of the KV cache.
        first_adapters: what was found in each of config.lora_modules, by name.

    Raises:
        UserError: the backend, the checkpoint or the budget is at fault; nothing is left behind.
        RankLost: another rank of the group is gone.
    """

    is_in_process = True

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, place: Place = WHOLE) -> None:
        registry = BackendRegistry.discover()
        info = registry.choose(config.backend)
        layer_overrides = replaced_layers(info.distribution, load_layer_overrides(info))
        self._place = place
        self._backend = _make(registry, info, config, place)
        try:
            self._load(config, checkpoint, info.distribution, layer_overrides)
        except BaseException:
            self.close()
            raise

    def _load(
        self, config: EngineConfig, checkpoint: Checkpoint, package: str, layer_overrides: Mapping[str, type]
    ) -> None:
        backend = self._backend
        self._opset = OpSet(backend, strict=config.strict_backend, package=package)
        multiplies = has_product_for(self._opset, backend.capabilities)
        checkpoint, formats = open_quantized(checkpoint, config.quantization, multiplies=multiplies)
        facts = read_config(checkpoint.config)
        check_header(checkpoint, facts)
        pooler = read_pooler(checkpoint.config, checkpoint.path, config.pooling)
        sizes = resolve_sizes(config, checkpoint.config, facts, backend.capabilities, formats.kv_scheme)
        if pooler is not None:
            sizes = pooling_sizes(config, sizes, pooler, facts, backend.capabilities)
        part_bytes = model_bytes(
            checkpoint, formats, self._opset, dtype=sizes.dtype, device=backend.capabilities,
            num_ranks=self._place.size,
        )  # fmt: skip
        check_weights_fit(part_bytes, sizes, backend.memory_info().free_bytes)
        self._comm = backend.communicator(self._place.rank, self._place.size, self._place.address)
        _check_recordable(backend, self._comm)
        self._adapters = make_slots(
            config, sizes, backend, self._opset, max_tokens=_step_tokens(backend, sizes), num_ranks=self._place.size
        )
        self._model = _build(
            checkpoint, formats, sizes, backend, self._opset, layer_overrides, self._comm, config, self._adapters,
            has_head=pooler is None,
        )  # fmt: skip
        stage: OutputStage
        if pooler is None:
            targets = self._model.weight_targets(norm_weights_include_one=checkpoint.norm_weights_include_one)
            load_weights(checkpoint, targets, progress=None if config.progress else False)
            stage, rows = SamplingStage(self._opset, self._model.vocab_size), sizes.max_drawn_rows
        else:
            stage = self._load_vectors(config, checkpoint, sizes, pooler)
            rows = num_rows(sizes, pooler, _step_tokens(backend, sizes))
        self.vocab_size = facts.vocab_size if sizes.gives_vectors else self._model.vocab_size
        self.first_adapters = {name: self.load_adapter(path) for name, path in config.lora_modules.items()}
        memory = RunnerMemory.allocate(
            backend,
            _step_tokens(backend, sizes),
            rows,
            self._model.vocab_size,
            adapters=self._adapters is not None,
        )
        calibrate(
            self._model, backend, self._opset, memory, adapters=self._adapters,
            kv_dtype=unrounded_kv(sizes.dtype, backend.capabilities),
            max_step_tokens=sizes.max_num_batched_tokens, max_model_len=sizes.max_model_len,
        )  # fmt: skip
        pool_views = self._allocate_kv(config, sizes)
        self._runner = ModelRunner(
            model=self._model,
            backend=backend,
            opset=self._opset,
            stage=stage if self._place.rank == 0 else FollowerStage(stage),
            memory=memory,
            pool_views=pool_views,
            max_num_seqs=self.sizes.max_num_seqs,
            max_model_len=self.sizes.max_model_len,
            block_sizes=tuple(group.block_size for group in self.kv_groups),
            second_text_offset=table_offset(sizes, facts),
            tells_fresh=not config.deterministic,
            adapters=self._adapters,
        )
        self._opset.verify()

    def _load_vectors(
        self, config: EngineConfig, checkpoint: Checkpoint, sizes: EngineSizes, pooler: Pooler
    ) -> PoolingStage:
        """Stream the weights of a model without a head, and those of its pooler."""
        head = build_head(pooler, self._backend, self._opset, sizes)
        targets = self._model.weight_targets(norm_weights_include_one=checkpoint.norm_weights_include_one)
        load_vectors_model(checkpoint, targets, pooler, head, progress=None if config.progress else False)
        return PoolingStage(self._backend, pooler, head)

    def _allocate_kv(self, config: EngineConfig, sizes: EngineSizes) -> list[KVCache]:
        """Allocate the pools from what is really free, bind the model's layers to them, and settle the sizes.

        Returns:
            One view of each pool.
        """
        backend = self._backend
        layers = group_layers(self._model.kv_specs())
        block_bytes = pool_block_bytes(layers)
        self._comm.barrier()  # what is free is measured when all weights are there: ranks may share a memory
        if sizes.whole_texts:
            (self.kv_groups, self.num_kv_blocks), self.sizes = places_of_texts(sizes), sizes
        else:
            self.kv_groups = scheduler_groups(layers)
            num_kv_blocks = kv_blocks_for(
                config, sizes, self.kv_groups, block_bytes * num_pools(layers), backend.memory_info().free_bytes
            )
            self.num_kv_blocks = _fewest(backend, self._comm, num_kv_blocks)
            self.sizes = fit_length(config, sizes, self.kv_groups, self.num_kv_blocks)
        pools = [backend.allocate_kv_pool(self.num_kv_blocks, block_bytes) for _ in range(num_pools(layers))]
        _bind_kv(self._model, backend, layers, pools)
        return [backend.kv_view(pool, layers[0].spec) for pool in pools]

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self._runner.execute(scheduled)

    def load_adapter(self, path: str) -> AdapterFacts:
        """See Executor."""
        assert self._adapters is not None  # the engine asks only where it serves adapters
        return self._adapters.load(path)

    def forget_adapter(self, adapter_id: str) -> None:
        """See Executor."""
        self._runner.adapters.forget(adapter_id)

    def take_drawn(self, drawn: Mapping[str, Sequence[int]]) -> None:
        """Learn, before the next step, what rank 0 drew in the last one; rank 0 knows."""
        if self._place.rank != 0:
            self._runner.append_drawn(drawn)

    def watched(self) -> Sequence[int]:
        """See Executor: a worker does nothing between steps."""
        return ()

    def check(self) -> None:
        """See Executor."""

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op, with reasons and call counts."""
        return self._opset.report()

    def close(self) -> None:
        """Release the model, the pools and the backend. Idempotent."""
        for name in ("_runner", "_model", "_adapters", "_opset"):
            self.__dict__.pop(name, None)  # their tensors go before the backend that made them
        if (comm := self.__dict__.pop("_comm", None)) is not None:
            comm.close()
        self._backend.close()


def make_backend(config: EngineConfig, place: Place = WHOLE) -> DeviceBackend:
    """Find, choose and make the backend that a config asks for, for a place in a group.

    Raises:
        BackendUnavailable: it can't run here; the message says why.
    """
    registry = BackendRegistry.discover()
    return _make(registry, registry.choose(config.backend), config, place)


def _make(registry: BackendRegistry, info: BackendInfo, config: EngineConfig, place: Place) -> DeviceBackend:
    backend = registry.create(
        info,
        options=config.backend_options,
        num_threads=config.num_threads,
        deterministic=config.deterministic,
        rank=place.rank,
        world_size=place.size,
    )
    if config.deterministic and not backend.capabilities.batch_invariant:
        backend.close()
        raise BackendUnavailable(
            f"backend {backend.name} can't promise that a reply does not depend on its batch; "
            "run without --deterministic, or on another backend",
            field="deterministic",
        )
    return backend


def scheduler_groups(layers: Sequence[KVGroup]) -> tuple[KVGroupSpec, ...]:
    """The scheduler's view of the model's KV groups."""
    return tuple(
        KVGroupSpec(index, group.spec.block_size, group.spec.window, len(group.layer_indices))
        for index, group in enumerate(layers)
    )


def _build(
    checkpoint: Checkpoint,
    formats: WeightFormats,
    sizes: EngineSizes,
    backend: DeviceBackend,
    opset: OpSet,
    layer_overrides: Mapping[str, type],
    comm: Communicator,
    config: EngineConfig,
    adapters: AdapterSlots | None,
    *,
    has_head: bool,
) -> Model:
    return build_model(
        checkpoint.config,
        backend=backend,
        opset=opset,
        dtype=sizes.dtype,
        kv_dtype=sizes.kv_dtype,
        block_size=sizes.block_size,
        max_num_batched_tokens=_step_tokens(backend, sizes),
        max_model_len=sizes.max_model_len,
        layer_overrides=layer_overrides,
        formats=formats,
        shard=Shard.of(comm),
        expert_parallel=config.expert_parallel,
        has_head=has_head,
        adapters=adapters,
    )


def _check_recordable(backend: DeviceBackend, comm: Communicator) -> None:
    """Refuse a recording of steps that the group's collectives can't be part of; replays would leave them out."""
    if backend.capabilities.graphs and not comm.capturable:
        raise BackendUnavailable(
            f"backend {backend.name} records steps, and its collectives over {comm.world_size} ranks can't be; "
            "switch its recording off, or set tensor_parallel_size to 1",
            field="tensor_parallel_size",
        )


def _fewest(backend: DeviceBackend, comm: Communicator, num_blocks: int) -> int:
    """The smallest number of any rank: the scheduler's blocks must exist on all of them."""
    if comm.world_size == 1:
        return num_blocks
    own = backend.from_host(torch.tensor([num_blocks]))
    of_ranks = backend.empty(comm.world_size, 1, dtype=torch.int64)
    comm.all_gather(own, out=of_ranks)
    return int(backend.to_host(of_ranks).min())


def _step_tokens(backend: DeviceBackend, sizes: EngineSizes) -> int:
    """Tokens of the largest step as the device sees it, padding included."""
    return padded_tokens(backend.capabilities.token_buckets, sizes.max_num_batched_tokens)


def _bind_kv(model: Model, backend: DeviceBackend, layers: Sequence[KVGroup], pools: Sequence[KVPool]) -> None:
    places = layer_places(layers)
    caches = [backend.kv_view(pools[pool], layers[group].spec) for group, pool in places]
    for cache in caches:
        check_readable(cache, backend.capabilities)
    model.bind_kv(caches, [group for group, _ in places])
