"""What probes ask of packages: read from files, with a remedy in every refusal."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.backends.common import probing

SRC = str(Path(__file__).parents[3] / "src")
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, changeable."""
    found = dict(VERSIONS)

    def version(package: str) -> str:
        if package not in found:
            raise importlib.metadata.PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return found


def test_the_oldest_versions_are_enough(versions: dict[str, str]) -> None:
    assert probing.package_refusal() is None


def test_what_is_missing_or_old_is_named_with_its_remedy(versions: dict[str, str]) -> None:
    versions["triton"] = "3.5.1"
    assert str(probing.package_refusal()) == 'triton 3.5.1 is older than 3.6; pip install "octavo[gpu]"'
    del versions["triton"]
    assert str(probing.package_refusal()) == 'the package triton is missing; pip install "octavo[gpu]"'
    versions["torch"] = "2.9.1+rocm6.4"
    assert str(probing.package_refusal()) == "torch 2.9.1+rocm6.4 is older than 2.11; install torch 2.11 or newer"


@pytest.mark.parametrize(
    ("text", "builds"),
    [
        ("__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", {"cuda": "13.0"}),
        ("cuda = None\nhip = '7.0.2'\n", {"hip": "7.0.2"}),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\nxpu: Optional[str] = '2025'\n", {}),
        ("no python at all", {}),
    ],
)
def test_torchs_build_is_read_from_its_version_file(tmp_path: Path, text: str, builds: dict[str, str]) -> None:
    file = tmp_path / "version.py"
    file.write_text(text)
    assert probing.torch_builds(file) == builds
    assert probing.torch_builds(tmp_path / "none.py") == {}


def test_the_installed_torchs_build_is_what_it_says_itself() -> None:
    import torch

    said = {name: vars(torch.version)[name] for name in ("cuda", "hip")}
    assert probing.torch_builds() == {name: version for name, version in said.items() if version}


def test_a_torch_for_another_device_is_refused(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "torch_builds", lambda: {"cuda": "13.0"})
    assert probing.build_refusal("cuda") is None
    refusal = str(probing.build_refusal("hip"))
    assert refusal == "torch 2.11.0+cu130 was built without ROCm; install a build of torch for ROCm: see pytorch.org"


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_probes_import_neither_torch_nor_triton(interpreted: str) -> None:
    code = (
        "import sys\n"
        "from octavo.core.backend.registry import BackendRegistry\n"
        "registry = BackendRegistry.discover()\n"
        "print(*(f'{name}: {registry.probe(name)}' for name in ('cuda', 'rocm')), sep='\\n')\n"
        "assert not {'torch', 'triton', 'numpy'} & sys.modules.keys()\n"
    )
    environment = {"PYTHONPATH": SRC, "TRITON_INTERPRET": interpreted, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cuda, rocm = done.stdout.splitlines()
    if interpreted == "1":
        assert "is_emulated=True" in cuda
        assert "is_emulated=True" in rocm


def test_the_cpu_backend_runs_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None  # whoever imports it fails\n"
        "import octavo.core.engine.llm, torch\n"
        "from octavo.core.backend import GemmSpec, OpSet, WeightSpec\n"
        "from octavo.core.backend.registry import BackendRegistry\n"
        "registry = BackendRegistry.discover()\n"
        "backend = registry.create(registry.choose('cpu'))\n"
        "ops = OpSet(backend)\n"
        "spec = GemmSpec(WeightSpec(16, 16, torch.float32), torch.float32, torch.float32)\n"
        "weight, out = ops.prepare_weight(spec), torch.empty(2, 16)\n"
        "weight.place(torch.eye(16), 0)\n"
        "ops.bind('gemm', spec)(torch.ones(2, 16), weight, out=out)\n"
        "assert torch.equal(out, torch.ones(2, 16))\n"
    )
    environment = {"PYTHONPATH": SRC, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
