"""Finding, asking and choosing backends, with plug-ins made on the fly."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from octavo.core.backend import Available, BackendConfig, BackendInfo, BackendRegistry, Refusal, hookimpl
from octavo.core.base.errors import BackendUnavailable, ConfigError
from tests.fakes import null_backend

HERE = __name__


def info(name: str = "acme", **kw: Any) -> BackendInfo:
    fields = {
        "api_version": 1,
        "distribution": f"octavo-{name}",
        "probe": f"{HERE}:probe_yes",
        "factory": f"{HERE}:make",
    }
    return BackendInfo(name=name, **(fields | kw))


def plugin(*infos: BackendInfo) -> types.SimpleNamespace:
    @hookimpl
    def register_backends(registry: BackendRegistry) -> None:
        for each in infos:
            registry.add(each)

    return types.SimpleNamespace(register_backends=register_backends)


def registry_of(*infos: BackendInfo) -> BackendRegistry:
    registry = BackendRegistry()
    for each in infos:
        registry.register(plugin(each), each.distribution)
    return registry


@dataclass(frozen=True)
class Options:
    streams: int = 1
    fast: bool = False
    ratio: float | None = 0.5
    mode: Literal["eager", "graph"] = "eager"
    label: str = ""

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}; it must be at least 1")


def probe_yes() -> Available:
    return Available("sixteen cores")


def probe_emulates() -> Available:
    return Available("a chip, emulated", is_emulated=True)


def probe_no() -> Refusal:
    return Refusal("no driver", "install one")


def probe_fails() -> None:
    raise RuntimeError("bad firmware")


def probe_nonsense() -> bool:
    return True


class Acme(null_backend.NullBackend):
    """Remembers what its factory was told."""

    name = "acme"

    def __init__(self, config: BackendConfig) -> None:
        super().__init__()
        self.config = config


def make(config: BackendConfig) -> Any:
    return Acme(config)


def make_fails(config: BackendConfig) -> None:
    raise OSError("device busy")


# -- finding ----------------------------------------------------------------------------------------------------


def test_the_cpu_is_found_and_registered_once() -> None:
    names = [i.name for i in BackendRegistry.discover().infos()]
    assert names.count("cpu") == 1


def test_probing_imports_no_torch() -> None:
    code = (
        "import sys; from octavo.core.backend import BackendRegistry; r = BackendRegistry.discover()\n"
        "print(r.probe('cpu')); assert 'torch' not in sys.modules"
    )
    src = Path(__file__).parents[2] / "src"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(src)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Available")


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str) -> None:
    """A package with a backend plug-in, as pip would leave it on sys.path."""
    module = package.replace("-", "_")
    (tmp_path / f"{module}.py").write_text(source)
    metadata = tmp_path / f"{module}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[octavo.backends]\n{module} = {module}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, module, raising=False)


GOOD = f"""
from octavo.core.backend import BackendInfo, hookimpl
@hookimpl
def register_backends(registry):
    registry.add(BackendInfo(name="vendor", api_version=1, distribution="octavo-vendor-a",
                             probe="{HERE}:probe_yes", factory="{HERE}:make"))
"""


def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "octavo-vendor-a", GOOD)
    assert BackendRegistry.discover().choose("vendor").distribution == "octavo-vendor-a"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GOOD.replace("def register_backends", "def register_backend"), "unknown hook 'register_backend'"),
        (GOOD.replace("@hookimpl", ""), "no @hookimpl named register_backends"),
        (GOOD.replace("(registry)", "(registry, device)"), "device"),
        (GOOD.replace('"vendor"', '"no such name!"'), "name is 'no such name!'"),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
    ],
)
def test_a_faulty_plugin_is_an_error_naming_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    install(tmp_path, monkeypatch, "octavo-vendor-b", source)
    with pytest.raises(BackendUnavailable) as error:
        BackendRegistry.discover()
    assert "octavo-vendor-b" in str(error.value)
    assert "fix or uninstall" in str(error.value)
    assert message in str(error.value)


def test_the_same_plugin_registers_once() -> None:
    registry, acme = BackendRegistry(), plugin(info())
    registry.register(acme, "octavo-acme")
    registry.register(acme, "octavo-acme")
    assert len(registry.infos()) == 1


def test_two_packages_with_one_name() -> None:
    with pytest.raises(BackendUnavailable, match=r"octavo-acme and octavo-other both .* acme: uninstall one"):
        registry_of(info(), info(distribution="octavo-other"))


@pytest.mark.parametrize(("offered", "upgrade"), [(1, "octavo-acme"), (4, "octavo")])
def test_versions_other_than_this_and_the_one_before_are_refused(offered: int, upgrade: str) -> None:
    registry = BackendRegistry(api_version=3)
    for version in (2, 3):
        registry.add(info(f"v{version}", api_version=version))
    with pytest.raises(BackendUnavailable, match=rf"API {offered}; this Octavo loads 2 and 3: upgrade {upgrade}$"):
        registry.add(info(api_version=offered))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "auto"),
        ("name", "Acme"),
        ("name", ""),
        ("probe", "no_colon"),
        ("factory", "a.b:"),
        ("options", "a b:c"),
        ("priority", "high"),
        ("layer_overrides", {"Attention": "x"}),
    ],
)
def test_a_record_is_validated_at_birth(field: str, value: Any) -> None:
    good = {"name": "acme", "api_version": 1, "distribution": "d", "probe": "m:p", "factory": "m:f"}
    with pytest.raises(ValueError, match=field):
        BackendInfo(**(good | {field: value}))


# -- asking and choosing ----------------------------------------------------------------------------------------


def test_a_probe_that_fails_is_a_refusal_naming_the_package() -> None:
    registry = registry_of(
        info("broken", probe=f"{HERE}:probe_fails"),
        info("odd", probe=f"{HERE}:probe_nonsense"),
        info("gone", probe="no_such_module_here:probe"),
    )
    for name, text in (("broken", "bad firmware"), ("odd", "neither Available"), ("gone", "no_such_module_here")):
        answer = registry.probe(name)
        assert isinstance(answer, Refusal)
        assert f"octavo-{name}" in answer.reason
        assert text in answer.reason


def test_auto_takes_the_available_one_of_highest_priority_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of(info("slow"), info("fast", priority=5), info("best", priority=9, probe=f"{HERE}:probe_no"))
    with caplog.at_level(logging.INFO):
        assert registry.choose().name == "fast"
    assert "auto: fast (sixteen cores); not best (no driver; install one)" in caplog.text
    assert [i.name for i in registry.infos()] == ["best", "fast", "slow"]


def test_auto_with_nothing_available_gives_every_reason() -> None:
    registry = registry_of(info("a", probe=f"{HERE}:probe_no"), info("b", probe=f"{HERE}:probe_fails"))
    with pytest.raises(BackendUnavailable, match=r"a \(no driver; install one\), b \(.*bad firmware"):
        registry.choose("auto")


def test_auto_passes_by_what_is_only_emulated() -> None:
    emulated = info("chip", priority=9, probe=f"{HERE}:probe_emulates")
    assert registry_of(info("slow"), emulated).choose().name == "slow"
    assert registry_of(info("slow"), emulated).choose("chip").name == "chip"
    with pytest.raises(
        BackendUnavailable, match=r"no backend can run here: chip \(only emulated here; ask for it by name"
    ):
        registry_of(emulated).choose()


def test_a_named_backend_never_becomes_another() -> None:
    registry = registry_of(info("cuda", probe=f"{HERE}:probe_no"), info("cpu"))
    with pytest.raises(BackendUnavailable, match="backend cuda can't run here: no driver; install one"):
        registry.choose("cuda")
    with pytest.raises(BackendUnavailable, match=r"no backend 'cdua': did you mean cuda\? known here: auto, cpu, cuda"):
        registry.choose("cdua")


# -- making -----------------------------------------------------------------------------------------------------


def test_the_factory_gets_typed_options() -> None:
    acme = info(options=f"{HERE}:Options")
    texts = {"streams": "4", "fast": "true", "ratio": "none", "mode": "graph", "label": "x=y"}
    backend: Any = registry_of(acme).create(acme, texts, num_threads=3, deterministic=True)
    assert backend.config == BackendConfig(3, True, Options(4, True, None, "graph", "x=y"))
    backend = registry_of(acme).create(acme)
    assert backend.config.options == Options()


def test_the_factory_is_told_its_rank() -> None:
    acme = info(options=f"{HERE}:Options")
    backend: Any = registry_of(acme).create(acme, rank=1, world_size=2)
    assert (backend.config.rank, backend.config.world_size) == (1, 2)
    for rank, world_size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"rank {rank} of {world_size}; ranks count from 0"):
            BackendConfig(rank=rank, world_size=world_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stream": "1"}, "no option stream: did you mean streams"),
        ({"streams": "many"}, "option streams of backend acme is 'many'; it must be an integer"),
        ({"fast": "maybe"}, "true or false"),
        ({"ratio": "half"}, "a number"),
        ({"mode": "graf"}, "one of eager, graph"),
        ({"streams": "0"}, "streams is 0; it must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], message: str) -> None:
    acme = info(options=f"{HERE}:Options")
    with pytest.raises(ConfigError, match=message):
        registry_of(acme).create(acme, options)


def test_a_backend_without_options_takes_none() -> None:
    with pytest.raises(ConfigError, match="acme takes no options; remove speed"):
        registry_of(info()).create(info(), {"speed": "1"})


@pytest.mark.parametrize(
    ("factory", "message"),
    [(f"{HERE}:make_fails", "failed to start: OSError: device busy"), ("missing_module:X", "can't be imported")],
)
def test_a_factory_that_fails_names_backend_and_package(factory: str, message: str) -> None:
    acme = info(factory=factory)
    with pytest.raises(BackendUnavailable, match=message) as error:
        registry_of(acme).create(acme)
    assert "octavo-acme" in str(error.value)


def test_the_null_backend_is_a_plugin_like_any_other() -> None:
    registry = BackendRegistry()
    registry.register(null_backend, "octavo-null")
    backend: Any = registry.create(registry.choose("null"), {"memory_bytes": "4096"})
    assert backend.memory_info().total_bytes == 4096


def test_the_null_backend_counts_what_lives() -> None:
    import torch

    backend = null_backend.NullBackend()
    tensor, pool = backend.empty(8, dtype=torch.float32), backend.allocate_kv_pool(4, 100)
    assert backend.live_bytes == 432
    del tensor, pool
    assert backend.live_bytes == 0
    backend.close()
    with pytest.raises(Exception, match="closed"):
        backend.empty(1, dtype=torch.float32)
