"""Names of adapters, and which contents live requests need: what the engine knows of low-rank adapters.

    name ──► AdapterInfo(adapter_id, path, …)           many names may mean one content
    adapter_id ──► live choices that run or wait with it

A name is gone as soon as it is unloaded, or means another content as soon as it is loaded anew; requests that were
accepted before go on with the content they were accepted for. A content without a name and without a live choice is
forgotten by the executor, on the host and on the device. Owned by the Engine; the weights are the executor's.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.core.base.errors import InvalidRequest
from octavo.core.base.lora import AdapterInfo
from octavo.core.base.names import did_you_mean
from octavo.core.engine.executor import Executor


class AdapterBook:
    """The adapters of one engine.

    Args:
        executor: holds their weights.
        is_enabled: whether the engine was started with adapters.
        first: those that the executor loaded at start.
    """

    def __init__(self, executor: Executor, *, is_enabled: bool, first: Iterable[AdapterInfo]) -> None:
        self._executor = executor
        self._is_enabled = is_enabled
        self._by_name = {info.name: info for info in first}
        self._live: dict[str, int] = {}
        self._of_choice: dict[str, str] = {}

    def list(self) -> list[AdapterInfo]:
        """The adapters that requests may name, in the order of their loading."""
        return list(self._by_name.values())

    def load(self, name: str, path: str) -> AdapterInfo:
        """Read an adapter; from now on the name means its content.

        Raises:
            InvalidRequest: the engine serves no adapters, or the name is empty.
            UserError: its files can't be used; what the name meant before, it still means.
        """
        self._check_enabled()
        if not name.strip():
            raise InvalidRequest("lora_name is empty; give the adapter a name", field="lora_name")
        facts = self._executor.load_adapter(path)
        info = AdapterInfo(
            name=name, path=path, adapter_id=facts.adapter_id, rank=facts.rank, num_layers=facts.num_layers
        )
        before = self._by_name.pop(name, None)
        self._by_name[name] = info
        if before is not None:
            self._forget_unneeded(before.adapter_id)
        return info

    def ensure(self, name: str, path: str) -> None:
        """Load an adapter unless the name means the one at that path; its files are not read again. Raises as load."""
        known = self._by_name.get(name)
        if path and (known is None or known.path != path):
            self.load(name, path)

    def unload(self, name: str) -> None:
        """Take a name away; accepted requests end with what it meant.

        Raises:
            InvalidRequest: nothing has that name.
        """
        self._check_enabled()
        adapter_id = self.id_of(name)
        del self._by_name[name]
        self._forget_unneeded(adapter_id)

    def id_of(self, name: str) -> str:
        """The content that a name means.

        Raises:
            InvalidRequest: the engine serves no adapters, or none of that name.
        """
        self._check_enabled()
        if name not in self._by_name:
            raise InvalidRequest(
                f"adapter {name[:100]!r} is not loaded{did_you_mean(name, self._by_name)}", field="lora_name"
            )
        return self._by_name[name].adapter_id

    def name_of(self, adapter_id: str) -> str:
        """A name that means this content; the content's own identity where no name does any more."""
        return next((info.name for info in self._by_name.values() if info.adapter_id == adapter_id), adapter_id)

    def enter(self, choice: str, adapter_id: str) -> None:
        """A choice was accepted with a content."""
        self._of_choice[choice] = adapter_id
        self._live[adapter_id] = self._live.get(adapter_id, 0) + 1

    def leave(self, choice: str) -> None:
        """A choice ended; those without an adapter are ignored."""
        adapter_id = self._of_choice.pop(choice, None)
        if adapter_id is None:
            return
        self._live[adapter_id] -= 1
        if not self._live[adapter_id]:
            del self._live[adapter_id]
            self._forget_unneeded(adapter_id)

    def _forget_unneeded(self, adapter_id: str) -> None:
        if adapter_id in self._live or any(info.adapter_id == adapter_id for info in self._by_name.values()):
            return
        self._executor.forget_adapter(adapter_id)

    def _check_enabled(self) -> None:
        if not self._is_enabled:
            raise InvalidRequest(
                "this engine serves no adapters; start it with enable_lora or lora_modules", field="lora_name"
            )
