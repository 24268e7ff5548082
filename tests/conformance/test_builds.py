"""Profile `compile`: every build counts, and a compiler that crashes costs one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from octavo.conformance import builds
from octavo.conformance.harness.result import Status
from octavo.core.backend.builds import BuildResult
from octavo.core.base.errors import ConfigError

PLUGIN = """
from octavo.core.backend import API_VERSION, BackendInfo, hookimpl

@hookimpl
def register_backends(registry):
    registry.add(BackendInfo(name="absent", api_version=API_VERSION, distribution="octavo-absent",
        probe="absent_plugin:probe", factory="absent_plugin:probe", builds="tests.conformance.test_builds:listed"))
"""


@dataclass(frozen=True)
class Fake:
    name: str
    op: str = "gemm"
    target: str = "chip_1"

    def build(self) -> BuildResult:
        what = self.name.partition("/")[2]
        if what == "exit":
            os._exit(3)
        if what == "raise":
            raise RuntimeError("the compiler refuses")
        return BuildResult({"registers": 32}, ("it spills",) if what == "spill" else ())


def listed(target: str | None) -> Sequence[Fake]:
    """What the plug-in names."""
    if target not in (None, "chip_1"):
        raise ConfigError(f"target is {target!r}; this backend compiles for chip_1", field="target")
    return [Fake(f"gemm.kernel/{what}") for what in ("fit", "spill", "raise", "exit", "fit-2")]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package, seen by the workers as well."""
    (tmp_path / "absent_plugin.py").write_text(PLUGIN)
    info = tmp_path / "octavo_absent-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-absent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[octavo.backends]\nabsent = absent_plugin\n")
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("absent_plugin", None)
    builds._listed.cache_clear()


@pytest.mark.usefixtures("plugin")
def test_each_build_is_judged_by_itself() -> None:
    seen: list[str] = []
    results = builds.build_all("absent", None, None, on_result=lambda r, *_: seen.append(r.name))
    assert [result.name.partition("/")[2] for result in results] == ["fit", "spill", "raise", "exit", "fit-2"]
    assert [result.status for result in results] == [
        Status.PASS, Status.FAIL, Status.FAIL, Status.CRASH, Status.PASS,
    ]  # fmt: skip
    assert results[0].figures == {"registers": 32}
    assert results[1].detail == "it spills"
    assert results[2].detail == "RuntimeError: the compiler refuses"
    assert results[0].rerun.endswith("--profile compile --target chip_1 --only gemm.kernel/fit")
    assert sorted(seen) == sorted(result.name for result in results)


@pytest.mark.usefixtures("plugin")
def test_a_selection_that_leaves_nothing_and_an_unknown_target_are_refused() -> None:
    with pytest.raises(ConfigError, match="no build of backend absent fits paged"):
        builds.build_all("absent", None, "paged", on_result=None)
    with pytest.raises(ConfigError, match="target is 'chip_2'; this backend compiles for chip_1"):
        builds.build_all("absent", "chip_2", None, on_result=None)


def test_a_backend_without_builds_says_so() -> None:
    with pytest.raises(ConfigError, match="backend cpu has no kernels that are compiled ahead of time"):
        builds.build_all("cpu", None, None, on_result=None)
