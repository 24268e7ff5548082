"""What runs an engine's steps: one device in this process, or a process for each rank of a group.

tensor_parallel_size 1     Engine ──> Worker
tensor_parallel_size N     Engine ──> MultiprocExecutor ──> N processes, a Worker in each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from octavo.core.backend.opset import OpChoice
from octavo.core.base.config import EngineConfig
from octavo.core.engine.resolve import EngineSizes
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.lora.slots import AdapterFacts
from octavo.core.parallel.mesh import even_range
from octavo.core.sched.kv_groups import KVGroupSpec
from octavo.core.sched.output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps on one or more devices.

    Attributes:
        sizes: of a step and a request.
        vocab_size: width of the logits.
        kv_groups, num_kv_blocks: the KV cache as the scheduler sees it.
        is_in_process: whether steps run in this process, so that they may call what a request brings.
        first_adapters: what was found in each of config.lora_modules, by name.
    """

    sizes: EngineSizes
    vocab_size: int
    kv_groups: tuple[KVGroupSpec, ...]
    num_kv_blocks: int
    is_in_process: bool
    first_adapters: dict[str, AdapterFacts]

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""

    def op_choices(self) -> tuple[OpChoice, ...]:
        """Which implementation runs each op."""

    def load_adapter(self, path: str) -> AdapterFacts:
        """Read a low-rank adapter, which requests may then name by its content. Raises UserError."""

    def forget_adapter(self, adapter_id: str) -> None:
        """Drop an adapter that no live request needs."""

    def watched(self) -> Sequence[int]:
        """File descriptors that become readable, between steps, when the executor has failed by itself."""

    def check(self) -> None:
        """Raise what has ended the executor between steps, if anything has."""

    def close(self) -> None:
        """Release devices, memory and processes. Idempotent."""


def make_executor(config: EngineConfig, checkpoint: Checkpoint) -> Executor:
    """Load a model, ready to run.

    Raises:
        UserError: the backend, the checkpoint or the memory budget is at fault; nothing is left behind.
        EngineDead: a rank's process ended.
    """
    if config.tensor_parallel_size > 1:
        from octavo.core.engine.multiproc import MultiprocExecutor

        _check_heads(checkpoint.config, config.tensor_parallel_size)
        return MultiprocExecutor(config, checkpoint.path)
    from octavo.core.engine.worker import Worker  # imports the models

    return Worker(config, checkpoint)


def _check_heads(values: Mapping[str, Any], size: int) -> None:
    """Refuse heads that so many ranks can't share before a process is started for each; a rank checks the rest."""
    heads = values.get("num_attention_heads")
    if type(heads) is int:
        even_range(heads, 0, size, "num_attention_heads")
