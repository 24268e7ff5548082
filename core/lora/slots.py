"""Which adapters are on the device, in which slots; the one owner of adapter weights.

    load(path) ─► read, checked against the model's parts, cut to this rank ─► host copy (max_cpu_loras, LRU)
                                                                                   │ acquire(id), when a request starts
    slot      0            1            2           …  max_loras - 1               ▼
              [ "9f…" ×3 ] [ "41…" ×0 ] [ empty ]                     slots of every part (parts.py)
                 pinned       idle: its slot is the next to be reused, the longest idle first

    requests of one step name their slot:  adapter_T [T] int32, -1 for the base model

While a model is built its layers register their parts (`product`, `embedding`, `experts`) and keep what they get. From
then on only the worker and its runner talk to it: `load` and `forget` for the engine, `acquire` and `release` around a
request's time on the device. An adapter is known by its content (adapter_id), never by name or path: equal copies are
one adapter. A host copy that made room is read again from its path, and refused if the files changed meanwhile.

What goes wrong with an adapter is an error of that one call; the slots are as they were before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.core.backend.device import DeviceBackend
from octavo.core.backend.opset import OpSet
from octavo.core.base.errors import BackendUnavailable, CheckpointError, ConfigError
from octavo.core.lora.adapter import directory_of, read_adapter
from octavo.core.lora.embedding import EmbeddingAdapters
from octavo.core.lora.experts import ExpertAdapters
from octavo.core.lora.fit import Place, fit_adapter
from octavo.core.lora.parts import LoraPart, LoraWeights, PartShape, ProductAdapters
from octavo.core.lora.stacked import ExpertStack

Repeats = Callable[[torch.Tensor], bool]
"""Whether a tensor repeats a layer's own weight; some adapters bring a copy of it."""


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a load found.

    Attributes:
        adapter_id: the content's digest.
        rank: the largest of its layers.
        num_layers: layers that it adapts; all experts of a layer may count as one.
    """

    adapter_id: str
    rank: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """What is where at one moment.

    Attributes:
        slots: adapter ids by slot; None: empty.
        pinned: those that running requests use.
        known: every adapter that was loaded and not forgotten, the longest unused first.
        host_bytes, device_bytes: of host copies, and of all slots.
    """

    slots: tuple[str | None, ...]
    pinned: frozenset[str]
    known: tuple[str, ...]
    host_bytes: int
    device_bytes: int


@dataclass(slots=True)
class _Known:
    """An adapter that was loaded and not forgotten; weights None: its host copy made room for others."""

    path: Path
    facts: AdapterFacts
    weights: Mapping[str, LoraWeights] | None


@dataclass(slots=True)
class _Slot:
    index: int
    adapter_id: str | None = None
    num_users: int = 0


class AdapterSlots:
    """The adapters of one model on one device.

    Args:
        backend, opset: where the model runs.
        dtype: of the model's activations, in which slots are kept.
        max_tokens: of a step.
        max_loras: slots.
        max_lora_rank: the largest rank that fits one.
        max_cpu_loras: host copies.
        demands_own_by: the setting, if any, that lets no adapter run on the reference: deterministic, since the
            reference's sums depend on the batch, or strict_backend.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        opset: OpSet,
        *,
        dtype: torch.dtype,
        max_tokens: int,
        max_loras: int,
        max_lora_rank: int,
        max_cpu_loras: int,
        demands_own_by: str | None = None,
    ) -> None:
        self._backend = backend
        self._opset = opset
        self._dtype = dtype
        self._max_tokens = max_tokens
        self._max_rank = max_lora_rank
        self._max_host_copies = max_cpu_loras
        self._demands_own_by = demands_own_by
        self._places: dict[str, Place] = {}
        self._stacks: dict[str, ExpertStack] = {}
        self._known: OrderedDict[str, _Known] = OrderedDict()  # the longest unused first
        self._slots = [_Slot(index) for index in range(max_loras)]  # the longest idle first
        self._generation = 0

    @property
    def generation(self) -> int:
        """Counts up when a part got memory: programs that were made before do not call its op."""
        return self._generation

    # -- while the model is built ------------------------------------------------------------------------------

    def product(
        self, shapes: Sequence[PartShape], *, dtype: torch.dtype | None = None, repeats: Repeats | None = None
    ) -> ProductAdapters:
        """The adapters of a product that stacks these parts, in this order; its layer calls `add` in each step.

        Args:
            shapes: of the parts, whose columns are alike.
            dtype: of the product's output, where it is not the activations' (logits are fp32).
            repeats: for a layer whose weight an adapter may bring a copy of.
        """
        return ProductAdapters([self._part(shape, dtype or self._dtype, repeats) for shape in shapes])

    def experts(
        self, up: Sequence[PartShape], down: PartShape, stack: ExpertStack, modules: Sequence[str]
    ) -> ExpertAdapters:
        """The adapters of a layer's experts.

        Args:
            up, down: the products before their activation, and the one behind it.
            stack: names and sizes of the experts, for adapters of parameters that hold them all.
            modules: names of the module that such adapters give to the experts.
        """
        self._stacks |= dict.fromkeys(modules, stack)
        return ExpertAdapters([self._part(shape, self._dtype) for shape in up], self._part(down, self._dtype))

    def embedding(self, shape: PartShape, *, scale: float, repeats: Repeats | None = None) -> EmbeddingAdapters:
        """The adapters of a token embedding whose rows the model multiplies by `scale`; see `product`."""
        part = EmbeddingAdapters(
            shape,
            self._backend,
            self._opset,
            scale=scale,
            max_tokens=self._max_tokens,
            dtype=self._dtype,
            num_slots=len(self._slots),
            max_rank=self._max_rank,
        )
        self._register(part, repeats)
        return part

    def alias(self, name: str, other: str) -> None:
        """Let adapters call a registered layer by another name."""
        self._places[other] = self._places[name]

    def _part(self, shape: PartShape, dtype: torch.dtype, repeats: Repeats | None = None) -> LoraPart:
        part = LoraPart(
            shape, self._backend, self._opset, dtype=dtype, num_slots=len(self._slots), max_rank=self._max_rank
        )
        self._register(part, repeats)
        return part

    def _register(self, part: LoraPart, repeats: Repeats | None) -> None:
        for member, name in enumerate((*part.shape.names, *part.shape.elsewhere)):
            if name in self._places:
                raise ValueError(f"two layers registered {name} for adapters")
            self._places[name] = Place(name, part, member < len(part.shape.names), repeats)

    # -- for the engine ----------------------------------------------------------------------------------------

    def load(self, path: str) -> AdapterFacts:
        """Read an adapter, check it and keep a host copy; its layers get memory where no adapter had them before.

        Raises:
            CheckpointError: the files are missing, damaged, or not for this model; nothing of it stays.
            ConfigError: the device has no memory for its layers' slots.
            BackendUnavailable: --strict-backend or --deterministic, and the backend has no kernel for adapters.
        """
        directory = directory_of(path)
        adapter = read_adapter(directory)
        weights = fit_adapter(adapter, self._places, self._stacks, self._max_rank)
        self._make_ready(weights)
        facts = AdapterFacts(adapter.adapter_id, adapter.settings.max_rank, adapter.num_layers)
        self._known[facts.adapter_id] = _Known(directory, facts, weights)
        self._touch(facts.adapter_id)
        return facts

    def forget(self, adapter_id: str) -> None:
        """Drop an adapter that no request uses: its host copy, and what its slot holds. Unknown ids are ignored."""
        self._known.pop(adapter_id, None)
        slot = self._slot_of(adapter_id)
        if slot is None:
            return
        if slot.num_users:
            raise RuntimeError(f"adapter {adapter_id} was dropped while {slot.num_users} requests used it")
        self._fill(slot, None, {})
        self._slots.remove(slot)
        self._slots.insert(0, slot)

    # -- for the runner ----------------------------------------------------------------------------------------

    def acquire(self, adapter_id: str) -> int:
        """Pin an adapter for a request that starts, and return its slot; filled first where it is in none.

        The scheduler lets no more than max_loras adapters run at once, so there is always a slot.

        Raises:
            CheckpointError: its host copy had made room, and its files can't be read again or have changed.
        """
        slot = self._slot_of(adapter_id)
        if slot is None:
            weights = self._weights_of(adapter_id)
            slot = next((slot for slot in self._slots if not slot.num_users), None)
            if slot is None:
                raise RuntimeError(f"no slot for adapter {adapter_id}: all {len(self._slots)} are in use")
            self._fill(slot, adapter_id, weights)
        slot.num_users += 1
        self._touch(adapter_id)
        return slot.index

    def release(self, adapter_id: str) -> None:
        """Undo one `acquire`; without users an adapter stays in its slot until another needs it."""
        slot = self._slot_of(adapter_id)
        if slot is None or not slot.num_users:
            raise RuntimeError(f"adapter {adapter_id} was released more often than acquired")
        slot.num_users -= 1
        self._slots.remove(slot)
        self._slots.append(slot)

    def use(self) -> AdapterUse:
        """What is where at this moment."""
        by_index = sorted(self._slots, key=lambda slot: slot.index)
        return AdapterUse(
            slots=tuple(slot.adapter_id for slot in by_index),
            pinned=frozenset(slot.adapter_id for slot in by_index if slot.num_users and slot.adapter_id),
            known=tuple(self._known),
            host_bytes=sum(layer.nbytes for known in self._known.values() for layer in (known.weights or {}).values()),
            device_bytes=sum(part.nbytes for part in self._parts()),
        )

    # -- inside ------------------------------------------------------------------------------------------------

    def _parts(self) -> list[LoraPart]:
        return list({id(place.part): place.part for place in self._places.values()}.values())

    def _slot_of(self, adapter_id: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.adapter_id == adapter_id), None)

    def _make_ready(self, layers: Mapping[str, LoraWeights]) -> None:
        """Give memory to the parts of these layers that have none, all or nothing."""
        new = [part for part in self._parts() if not part.is_ready and any(name in layers for name in part.shape.names)]
        if not new:
            return
        self._check_own(new)
        needed_bytes, free_bytes = sum(part.slot_bytes for part in new), self._backend.memory_info().free_bytes
        if needed_bytes > free_bytes:
            raise ConfigError(
                f"the slots of {len(new)} more layers take {needed_bytes} bytes, but {free_bytes} are free; lower "
                "max_loras or max_lora_rank, or name the adapter in lora_modules so that it gets its memory at start",
                field="max_loras",
            )
        for part in new:
            part.make_ready()
        self._generation += 1

    def _check_own(self, parts: Sequence[LoraPart]) -> None:
        """Refuse a fallback before anything is bound or allocated, so that an engine that goes on goes on as it was."""
        if self._demands_own_by is None:
            return
        trial = OpSet(self._backend)
        for part in parts:
            trial.bind("lora_gemm", part.spec)
        for choice in trial.report():
            if choice.implementation == "fallback":
                raise BackendUnavailable(
                    f"{self._demands_own_by} allows no adapter here: backend {self._backend.name} has no kernel of its "
                    f"own for them ({choice.reason}); leave out one of the two, or choose another backend",
                    field=self._demands_own_by,
                )

    def _touch(self, adapter_id: str) -> None:
        """Count an adapter as used last, and let host copies beyond the limit go."""
        self._known.move_to_end(adapter_id)
        copies = [known for known in self._known.values() if known.weights is not None]
        for known in copies[: -self._max_host_copies]:
            known.weights = None

    def _weights_of(self, adapter_id: str) -> Mapping[str, LoraWeights]:
        """A host copy, read again where it had made room."""
        known = self._known[adapter_id]
        if known.weights is None:
            adapter = read_adapter(known.path)
            if adapter.adapter_id != adapter_id:
                raise CheckpointError(
                    f"the files of adapter {known.path} changed since it was loaded; load it again", field="lora"
                )
            known.weights = fit_adapter(adapter, self._places, self._stacks, self._max_rank)
        return known.weights

    def _fill(self, slot: _Slot, adapter_id: str | None, layers: Mapping[str, LoraWeights]) -> None:
        slot.adapter_id = None  # should a copy fail, the slot holds nobody's weights
        for part in self._parts():
            if part.is_ready:
                members = {i: layers[name] for i, name in enumerate(part.shape.names) if name in layers}
                part.fill(slot.index, members)
        slot.adapter_id = adapter_id
