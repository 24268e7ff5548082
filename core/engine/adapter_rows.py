"""Which adapter slot each running request has: the runner's side of low-rank adapters.

A request that starts pins its adapter's slot until it ends or is preempted. When an adapter can't be brought to the
device (its host copy had made room and its files are gone), the request runs through its first step without, and is
reported as failed with that step: nobody else notices. Only the ModelRunner talks to it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from octavo.core.base.errors import CheckpointError
from octavo.core.lora.slots import AdapterSlots
from octavo.core.sched.output import ModelRunnerOutput, NewRequest

NO_SLOT = -1


class AdapterRows:
    """Slots of running requests.

    Args:
        slots: of the device; None where the engine serves no adapters.
    """

    def __init__(self, slots: AdapterSlots | None) -> None:
        self._slots = slots
        self._of_request: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    @property
    def generation(self) -> int:
        """See AdapterSlots."""
        return 0 if self._slots is None else self._slots.generation

    def enter(self, new: NewRequest) -> int:
        """Pin the adapter of a request that starts; returns its slot."""
        if new.adapter_id is None or self._slots is None:
            return NO_SLOT
        try:
            slot = self._slots.acquire(new.adapter_id)
        except CheckpointError as error:
            self._failed[new.request_id] = str(error)
            return NO_SLOT
        self._of_request[new.request_id] = new.adapter_id
        return slot

    def leave(self, request_ids: Iterable[str]) -> None:
        """Requests ended or were preempted; those without an adapter are ignored."""
        for request_id in request_ids:
            if (adapter_id := self._of_request.pop(request_id, None)) is not None:
                assert self._slots is not None
                self._slots.release(adapter_id)

    def forget(self, adapter_id: str) -> None:
        """Drop an adapter that no live request needs. Of those that ended the next step would have told."""
        self.leave([request_id for request_id, used in self._of_request.items() if used == adapter_id])
        if self._slots is not None:
            self._slots.forget(adapter_id)

    def result(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """A step's result, with the requests whose adapter could not be had as failed."""
        if not self._failed:
            return result
        failed, self._failed = self._failed, {}
        sampled = {request_id: drawn for request_id, drawn in result.sampled.items() if request_id not in failed}
        return msgspec.structs.replace(result, sampled=sampled, failed=result.failed | failed)
