"""Who can run a model here: finds backends, asks them, chooses one, and explains every refusal.

    discover()  entry points "octavo.backends" + octavo/backends/*/plugin.py (an uninstalled tree has no entry points)
       │        each plug-in's hook adds BackendInfo records: plain data, nothing of the backend is imported yet
    probe(name) imports only the cheap probe         ─► Available(detail) | Refusal(reason, remedy)
    choose(…)   one backend, by name or "auto"       ─► BackendInfo, or BackendUnavailable that says why
    create(…)   imports the factory, for the first time ─► DeviceBackend

Imports no torch, so that `octavo backends` answers at once. Whatever a plug-in does wrong is an error that names its
package and a remedy; nothing is skipped silently, and no backend silently becomes another.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import pluggy

from octavo.core.backend import hookspecs
from octavo.core.backend.options import parse_options
from octavo.core.base.errors import BackendUnavailable, ConfigError, OctavoError
from octavo.core.base.names import nearest

if TYPE_CHECKING:
    from octavo.core.backend.builds import KernelBuild, ListBuilds
    from octavo.core.backend.device import DeviceBackend

log = logging.getLogger(__name__)

API_VERSION = 1
"""Version of the public surface `octavo.core.backend`. A registry loads this one and the one before it."""

AUTO = "auto"

_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class Available:
    """A probe's yes, with a line about the device.

    Attributes:
        is_emulated: another device does its work, for tests: taken by name only, never by "auto".
    """

    detail: str = ""
    is_emulated: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A probe's no: why, and what would help."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """What a factory is told.

    Attributes:
        num_threads: host threads to compute with; None: as many as the process may use, or its rank's share of them.
        deterministic: the same request must give the same bits, whatever shares its batch.
        options: an instance of the options dataclass; None for a backend without options.
        rank, world_size: whose device this is, of a group with one process and one device for each rank. A backend of
            many devices takes the one numbered `rank` of those that it may use; cpu takes its share of the processors.
    """

    num_threads: int | None = None
    deterministic: bool = False
    options: Any = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size}; ranks count from 0 and end before world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A backend as its package describes it. "module:attribute" strings keep it free of imports.

    Attributes:
        name: its identity: lower case, digits, "-" and "_".
        api_version: the version of `octavo.core.backend` that it was written against.
        distribution: the package that brings it, as pip knows it.
        probe: `() -> Available | Refusal`; cheap, and imports no torch.
        factory: `(BackendConfig) -> DeviceBackend`.
        priority: "auto" takes the available backend of highest priority.
        layer_overrides: name of a core layer (Attention, Embedding, Linear, OutputHead, RMSNorm) -> a function that
            takes its class and returns the class to build in its place, a subclass of it.
        options: dataclass of its `--backend-option`s.
        tune: `(open_device, only=…, on_found=…, write=…)`: the search of `octavo tune`. `open_device()` makes the
            device, in any process; `write(name, text)` keeps a file of the package's folder `tuning` once it is better.
        builds: `(target | None) -> [KernelBuild, …]`: kernels that can be compiled without the device (`builds.py`).
    """

    name: str
    api_version: int
    distribution: str
    probe: str
    factory: str
    priority: int = 0
    layer_overrides: Mapping[str, str] = field(default_factory=dict)
    options: str | None = None
    builds: str | None = None
    tune: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name == AUTO:
            raise ValueError(f'name is {self.name!r}; it must match {_NAME.pattern} and not be "{AUTO}"')
        for key, kind in (("api_version", int), ("priority", int), ("distribution", str)):
            if not isinstance(getattr(self, key), kind):
                raise ValueError(f"{key} of backend {self.name} is {getattr(self, key)!r}; it must be {kind.__name__}")
        references = {"probe": self.probe, "factory": self.factory}
        references |= {f"layer_overrides[{k!r}]": v for k, v in self.layer_overrides.items()}
        references |= {key: value for key in ("options", "builds", "tune") if (value := getattr(self, key)) is not None}
        for key, value in references.items():
            if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
                raise ValueError(f'{key} of backend {self.name} is {value!r}; it must have the form "module:attribute"')
        object.__setattr__(self, "layer_overrides", MappingProxyType(dict(self.layer_overrides)))


class BackendRegistry:
    """The backends known to this process. Made by its user; there is no global one."""

    def __init__(self, *, api_version: int = API_VERSION) -> None:
        self._api_version = api_version
        self._infos: dict[str, BackendInfo] = {}
        self._plugins = pluggy.PluginManager(hookspecs.PROJECT)
        self._plugins.add_hookspecs(hookspecs)
        # Historic: from now on every plug-in's hook runs at the moment the plug-in is registered.
        self._plugins.hook.register_backends.call_historic(kwargs={"registry": self})

    @classmethod
    def discover(cls) -> BackendRegistry:
        """A registry of all installed and built-in backends. Raises BackendUnavailable for a faulty plug-in."""
        registry = cls()
        for point in importlib.metadata.entry_points(group=hookspecs.ENTRY_POINT_GROUP):
            package = point.dist.name if point.dist is not None else point.value
            registry.register(_load_plugin(package, point.load), package)
        for module in _built_in_plugins():
            registry.register(_load_plugin("octavo", functools.partial(importlib.import_module, module)), "octavo")
        return registry

    def register(self, plugin: object, package: str) -> None:
        """Let one plug-in add its backends; a plug-in that is already here is left alone.

        Raises BackendUnavailable, naming the package, when its hook is missing, mistyped or fails.
        """
        if self._plugins.is_registered(plugin):
            return
        try:
            self._plugins.register(plugin)
            self._plugins.check_pending()
        except OctavoError:
            raise
        except Exception as error:
            raise _faulty(package, str(error)) from error
        if not self._plugins.get_hookcallers(plugin):
            raise _faulty(package, "it has no @hookimpl named register_backends")

    def add(self, info: BackendInfo) -> None:
        """Take in one backend; plug-ins call this. Raises BackendUnavailable for a name or version that can't be."""
        oldest = max(1, self._api_version - 1)
        if not oldest <= info.api_version <= self._api_version:
            versions = " and ".join(str(v) for v in range(oldest, self._api_version + 1))
            wanted = "octavo" if info.api_version > self._api_version else info.distribution
            raise BackendUnavailable(
                f"backend {info.name} of package {info.distribution} was written for backend API {info.api_version}; "
                f"this Octavo loads {versions}: upgrade {wanted}"
            )
        other = self._infos.get(info.name)
        if other is not None:
            raise BackendUnavailable(
                f"packages {other.distribution} and {info.distribution} both bring a backend named {info.name}: "
                "uninstall one of them"
            )
        self._infos[info.name] = info

    def infos(self) -> tuple[BackendInfo, ...]:
        """All backends, in the order in which "auto" considers them."""
        return tuple(sorted(self._infos.values(), key=lambda info: (-info.priority, info.name)))

    def info(self, name: str) -> BackendInfo:
        """The record of a name. Raises BackendUnavailable, offering the nearest, when there is none."""
        if name in self._infos:
            return self._infos[name]
        near = nearest(name, self._infos)
        hint = f"did you mean {near}? " if near else ""
        known = ", ".join(info.name for info in self.infos()) or "none"
        raise BackendUnavailable(f"there is no backend {name!r}: {hint}known here: {AUTO}, {known}", field="backend")

    def probe(self, name: str) -> Available | Refusal:
        """Ask a backend whether it can run here. A probe that fails is a Refusal naming the package."""
        info = self.info(name)
        try:
            answer = resolve(info.probe)()
        except Exception as error:
            return Refusal(
                f"the probe of package {info.distribution} failed: {type(error).__name__}: {error}",
                f"reinstall or report {info.distribution}",
            )
        if not isinstance(answer, Available | Refusal):
            return Refusal(
                f"the probe of package {info.distribution} returned {answer!r}, neither Available nor Refusal",
                f"report it to the authors of {info.distribution}",
            )
        return answer

    def choose(self, name: str = AUTO) -> BackendInfo:
        """The named backend if it can run here, or for "auto" the available one of highest priority.

        Raises BackendUnavailable with each probe's reason.
        """
        if name != AUTO:
            info, answer = self.info(name), self.probe(name)
            if isinstance(answer, Refusal):
                raise BackendUnavailable(f"backend {name} can't run here: {answer}", field="backend")
            return info
        refusals: list[str] = []
        for info in self.infos():
            answer = self.probe(info.name)
            if isinstance(answer, Available) and answer.is_emulated:
                refusals.append(f"{info.name} (only emulated here; ask for it by name)")
            elif isinstance(answer, Available):
                skipped = f"; not {', not '.join(refusals)}" if refusals else ""
                log.info("backend auto: %s (%s)%s", info.name, answer.detail, skipped)
                return info
            else:
                refusals.append(f"{info.name} ({answer})")
        raise BackendUnavailable(f"no backend can run here: {', '.join(refusals) or 'none is known'}", field="backend")

    def create(
        self,
        info: BackendInfo,
        options: Mapping[str, str] | None = None,
        *,
        num_threads: int | None = None,
        deterministic: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> DeviceBackend:
        """Make the device, and check that it is what it declares.

        `options` are texts of `--backend-option key=value`; the others are BackendConfig's. Raises ConfigError for a
        wrong option, BackendUnavailable when the factory fails or the device is at fault.
        """
        options_type = _guarded(info, "options", info.options) if info.options is not None else None
        parsed = parse_options(info.name, options_type, options or {})
        factory = _guarded(info, "factory", info.factory)
        config = BackendConfig(num_threads, deterministic, parsed, rank, world_size)
        try:
            backend: DeviceBackend = factory(config)
        except OctavoError:
            raise
        except Exception as error:
            raise BackendUnavailable(
                f"backend {info.name} of package {info.distribution} failed to start: {type(error).__name__}: {error}",
                field="backend",
            ) from error
        _check(info, backend)
        return backend


def load_layer_overrides(info: BackendInfo) -> dict[str, Callable[[type], type]]:
    """A backend's replacements of layers, imported: name of a core layer -> function from its class to another.

    Raises BackendUnavailable, naming the package, when one can't be imported.
    """
    return {
        layer: _guarded(info, f"layer_overrides[{layer!r}]", reference)
        for layer, reference in info.layer_overrides.items()
    }


def load_builds(info: BackendInfo, target: str | None = None) -> Sequence[KernelBuild]:
    """A backend's kernels for a chip, to be compiled ahead of time; its probe is not asked.

    Raises:
        BackendUnavailable: naming the package, when the list can't be imported.
        ConfigError: the backend compiles nothing ahead of time, or doesn't know the target.
    """
    if info.builds is None:
        raise ConfigError(
            f"backend {info.name} has no kernels that are compiled ahead of time; use another profile", field="profile"
        )
    list_builds: ListBuilds = _guarded(info, "builds", info.builds)
    return list_builds(target)


def load_tune(info: BackendInfo) -> Callable[..., None]:
    """A backend's search for launch parameters. Raises ConfigError when it has none, BackendUnavailable as above."""
    if info.tune is None:
        raise ConfigError(f"backend {info.name} has no launch parameters to tune", field="backend")
    return cast("Callable[..., None]", _guarded(info, "tune", info.tune))


def resolve(reference: str) -> Callable[..., Any]:
    """The object that "module:attribute" names. Raises ImportError or AttributeError."""
    module, _, attribute = reference.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _guarded(info: BackendInfo, key: str, reference: str) -> Any:
    """`resolve` for a chosen backend, where a failure is the user's to see."""
    try:
        return resolve(reference)
    except Exception as error:
        raise BackendUnavailable(
            f"backend {info.name}: {key} {reference} of package {info.distribution} can't be imported: {error}; "
            f"reinstall {info.distribution}",
            field="backend",
        ) from error


def _check(info: BackendInfo, backend: DeviceBackend) -> None:
    from octavo.core.backend.selfcheck import device_fault  # torch is there now

    fault = device_fault(info.name, backend)
    if fault is None:
        return
    if callable(close := getattr(backend, "close", None)):
        close()
    raise BackendUnavailable(
        f"backend {info.name} of package {info.distribution} is not what it declares: {fault}; "
        f"upgrade {info.distribution} or report it to its authors",
        field="backend",
    )


def _load_plugin(package: str, load: Callable[[], object]) -> object:
    try:
        return load()
    except Exception as error:
        raise _faulty(package, f"{type(error).__name__}: {error}") from error


def _faulty(package: str, fault: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the backend plug-in of package {package} is faulty: {fault}; fix or uninstall {package}"
    )


def _built_in_plugins() -> list[str]:
    """Names of the octavo.backends.*.plugin modules of this tree."""
    backends = importlib.import_module("octavo.backends")
    names = [f"{backends.__name__}.{m.name}.plugin" for m in pkgutil.iter_modules(backends.__path__) if m.ispkg]
    return [name for name in names if importlib.util.find_spec(name) is not None]
