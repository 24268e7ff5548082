"""One device's share of an engine: its backend, its model's weights, its KV pools, its runner.

    Worker(config, checkpoint)
      backend chosen and made, ops bound        BackendRegistry, OpSet
      model built, weights streamed in          build_model, load_weights
      the runner's buffers allocated            RunnerMemory
      pools allocated from what is really free  kv_blocks_for
      runner made                               ModelRunner

A worker is also the executor of a one-device engine: `execute` runs a step. `close` gives everything back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.kv import KVPool
from octavo.core.backend.opset import OpChoice, OpSet
from octavo.core.backend.registry import BackendInfo, BackendRegistry, load_layer_overrides
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import BackendUnavailable
from octavo.core.engine.buckets import padded_tokens
from octavo.core.engine.resolve import EngineSizes, check_weights_fit, fit_length, kv_blocks_for, resolve_sizes
from octavo.core.engine.runner import ModelRunner, RunnerMemory
from octavo.core.engine.sampling_stage import SamplingStage
from octavo.core.layers.kv_groups import KVGroup, group_layers, layer_places, num_pools, pool_block_bytes
from octavo.core.layers.overrides import replaced_layers
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.load.stream import load_weights
from octavo.core.load.weight_bytes import weight_bytes
from octavo.core.models.base import Model
from octavo.core.models.registry import build_model, read_config
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput


class Worker:
    """A model on a device, ready to run steps.

    Args:
        config: as the user gave it.
        checkpoint: opened; only read.

    Attributes:
        sizes: what the config left open is filled in.
        vocab_size: width of the logits.
        kv_groups, num_kv_blocks: what the scheduler has to know of the KV cache.

    Raises:
        UserError: the backend, the checkpoint or the budget is at fault; nothing is left behind.
    """

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        registry = BackendRegistry.discover()
        info = registry.choose(config.backend)
        layer_overrides = replaced_layers(info.distribution, load_layer_overrides(info))
        self._backend = _make(registry, info, config)
        try:
            self._load(config, checkpoint, info.distribution, layer_overrides)
        except BaseException:
            self.close()
            raise

    def _load(
        self, config: EngineConfig, checkpoint: Checkpoint, package: str, layer_overrides: Mapping[str, type]
    ) -> None:
        backend = self._backend
        facts = read_config(checkpoint.config)
        sizes = resolve_sizes(config, checkpoint.config, facts, backend.capabilities)
        check_weights_fit(weight_bytes(checkpoint, sizes.dtype), sizes, backend.memory_info().free_bytes)
        self._opset = OpSet(backend, strict=config.strict_backend, package=package)
        self._model = _build(checkpoint, sizes, backend, self._opset, layer_overrides)
        targets = self._model.weight_targets(norm_weights_include_one=checkpoint.norm_weights_include_one)
        load_weights(checkpoint, targets, progress=None if config.progress else False)
        self.vocab_size = self._model.vocab_size
        memory = RunnerMemory.allocate(backend, _step_tokens(backend, sizes), sizes.max_num_seqs, self.vocab_size)
        layers = group_layers(self._model.kv_specs())
        self.kv_groups = scheduler_groups(layers)
        block_bytes = pool_block_bytes(layers)
        self.num_kv_blocks = kv_blocks_for(
            config, sizes, self.kv_groups, block_bytes * num_pools(layers), backend.memory_info().free_bytes
        )
        self.sizes = fit_length(config, sizes, self.kv_groups, self.num_kv_blocks)
        pools = [backend.allocate_kv_pool(self.num_kv_blocks, block_bytes) for _ in range(num_pools(layers))]
        _bind_kv(self._model, backend, layers, pools)
        self._runner = ModelRunner(
            model=self._model,
            backend=backend,
            opset=self._opset,
            stage=SamplingStage(self._opset, self.vocab_size),
            memory=memory,
            pool_views=[backend.kv_view(pool, layers[0].spec) for pool in pools],
            max_num_seqs=self.sizes.max_num_seqs,
            max_model_len=self.sizes.max_model_len,
            block_sizes=tuple(group.block_size for group in self.kv_groups),
        )
        self._opset.verify()

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self._runner.execute(scheduled)

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op, with reasons and call counts."""
        return self._opset.report()

    def close(self) -> None:
        """Release the model, the pools and the backend. Idempotent."""
        for name in ("_runner", "_model", "_opset"):
            self.__dict__.pop(name, None)  # their tensors go before the backend that made them
        self._backend.close()


def make_backend(config: EngineConfig) -> DeviceBackend:
    """Find, choose and make the backend that a config asks for.

    Raises:
        BackendUnavailable: it can't run here; the message says why.
    """
    registry = BackendRegistry.discover()
    return _make(registry, registry.choose(config.backend), config)


def _make(registry: BackendRegistry, info: BackendInfo, config: EngineConfig) -> DeviceBackend:
    backend = registry.create(
        info,
        options=config.backend_options,
        num_threads=config.num_threads,
        deterministic=config.deterministic,
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
    sizes: EngineSizes,
    backend: DeviceBackend,
    opset: OpSet,
    layer_overrides: Mapping[str, type],
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
    )


def _step_tokens(backend: DeviceBackend, sizes: EngineSizes) -> int:
    """Tokens of the largest step as the device sees it, padding included."""
    return padded_tokens(backend.capabilities.token_buckets, sizes.max_num_batched_tokens)


def _bind_kv(model: Model, backend: DeviceBackend, layers: Sequence[KVGroup], pools: Sequence[KVPool]) -> None:
    places = layer_places(layers)
    caches = [backend.kv_view(pools[pool], layers[group].spec) for group, pool in places]
    model.bind_kv(caches, [group for group, _ in places])
