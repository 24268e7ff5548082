"""StepRunners of one model that is split over ranks, which are threads of this process, driven as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo.core.load.checkpoint import Checkpoint
from octavo.core.parallel.shard import Shard
from tests.fakes.thread_group import ThreadGroup
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model


class RankRunner:
    """The methods of StepRunner, on every rank; what the ranks come to must have the same bits.

    Args:
        checkpoint: opened; each rank takes its part of it.
        size: ranks.
        make_backend: gives each rank its device.
        options: of `load_model`.

    Attributes:
        group: counts collectives.
        runners: one per rank.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        size: int,
        *,
        make_backend: Callable[[], Any] = ReferenceBackend,
        **options: Any,
    ) -> None:
        self.group = ThreadGroup(size)
        self._backends: list[Any] = []

        def load(rank: int) -> StepRunner:
            backend = make_backend()
            self._backends.append(backend)
            model, opset = load_model(checkpoint, backend, shard=Shard.of(self.group.comms[rank]), **options)
            return StepRunner(model, backend, opset)

        try:
            self.runners = self.group.run(load)
        except BaseException:
            self.close()
            raise
        self.vocab_size = self.runners[0].vocab_size

    def prompt(
        self, name: str, token_ids: Sequence[int], chunk: int | None = None, *, keep: int | None = None
    ) -> torch.Tensor:
        """See StepRunner."""
        return self._agreed(lambda runner: runner.prompt(name, token_ids, chunk, keep=keep))

    def greedy(self, name: str, token_ids: Sequence[int], num_tokens: int, chunk: int | None = None) -> list[int]:
        """See StepRunner."""
        found = self.group.run(lambda rank: self.runners[rank].greedy(name, token_ids, num_tokens, chunk))
        assert all(other == found[0] for other in found)
        return found[0]

    def finish(self, name: str) -> None:
        """See StepRunner."""
        for runner in self.runners:
            runner.finish(name)

    def close(self) -> None:
        """End the ranks and their devices."""
        self.group.close()
        self.runners = []
        for backend in self._backends:
            backend.close()

    def _agreed(self, work: Callable[[StepRunner], torch.Tensor]) -> torch.Tensor:
        found = self.group.run(lambda rank: work(self.runners[rank]))
        for rank, other in enumerate(found):
            assert torch.equal(other, found[0]), f"rank {rank} has other logits than rank 0"
        return found[0]
