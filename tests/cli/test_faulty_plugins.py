"""What an installed plug-in does wrong ends a command at its start: one line that names the package and a remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.core.cli.main import main
from tests.fakes import tiny_models

PLUGIN = """
import octavo.core.backend as api


@api.hookimpl
def register_backends(registry):
    registry.add(
        api.BackendInfo(
            name="vendor",
            api_version=1,
            distribution="octavo-vendor",
            probe="octavo_vendor:probe",
            factory="octavo_vendor:make",
        )
    )


def probe():
    return api.Available("here")


class Ops:
    def supports(self, op, spec):
        return api.Unsupported("not yet")

    def gemm(self, *args, **kwargs):
        raise AssertionError

    def prepare_weight(self, spec):
        raise AssertionError


def make(config):
    import torch

    backend = api.HostDevice()
    backend.name = "vendor"
    backend.ops = Ops()
    backend.capabilities = api.Capabilities(
        device_name="here",
        arch="none",
        activation_dtype={torch.float32: torch.float32},
        default_dtype=torch.float32,
        kv_dtypes=(torch.float32,),
        total_memory_bytes=1 << 30,
    )
    return backend
"""

FAULTS = {
    "a mistyped hook": (
        "def register_backends",
        "def register_backend",
        "unknown hook 'register_backend'",
        "uninstall",
    ),
    "a name that is taken": ('name="vendor"', 'name="cpu"', "both bring a backend named cpu", "uninstall one of them"),
    "a later version": ("api_version=1", "api_version=9", "was written for backend API 9", "upgrade octavo"),
    "a probe that raises": (
        'return api.Available("here")',
        "raise OSError('bad chip')",
        "OSError: bad chip",
        "reinstall",
    ),
    "a product without packing": ("def prepare_weight", "def pack", "gemm but no prepare_weight()", "upgrade"),
    "no answer": ('return api.Unsupported("not yet")', "return False", "answers False; it must answer", "upgrade"),
    "a dtype that is none": (
        "kv_dtypes=(torch.",
        "kv_dtypes=('float8', torch.",
        "declares float8 in kv_dtypes",
        "upgrade",
    ),
    "no memory": ("total_memory_bytes=1 << 30", "total_memory_bytes=0", "they must be positive", "upgrade"),
    "no kernel of its own": ("strict", "strict", "--strict-backend: backend vendor", "run without the flag"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save(tiny_models.make_llama(), tmp_path_factory.mktemp("model")))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package octavo-vendor of this source on the path, as pip would."""

    def put(source: str) -> None:
        (tmp_path / "octavo_vendor.py").write_text(source)
        metadata = tmp_path / "octavo_vendor-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: octavo-vendor\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text("[octavo.backends]\nvendor = octavo_vendor\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "octavo_vendor", raising=False)

    return put


def test_the_honest_plugin_runs(install, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    install(PLUGIN)
    assert main(["backends", "--ops", model, "--backend", "vendor", "--num-kv-blocks", "64"]) == 0
    assert "(not yet)" in capsys.readouterr().out


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_at_the_start(fault: str, install, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong, message, remedy = FAULTS[fault]
    install(PLUGIN.replace(right, wrong))
    strict = ["--strict-backend"] if fault == "no kernel of its own" else []
    assert main(["backends", "--ops", model, "--backend", "vendor", "--num-kv-blocks", "64", *strict]) == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("octavo")]
    assert message in line
    assert "octavo-vendor" in line
    assert remedy in line
    assert "Traceback" not in printed.err
    assert printed.out == ""
