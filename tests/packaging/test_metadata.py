"""What pyproject.toml promises: a small base, no pins in the metadata, exact pins in the lock file."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import octavo

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BASE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {extra: [Requirement(text) for text in texts] for extra, texts in PROJECT["optional-dependencies"].items()}


def lock():
    """Package -> version of requirements/cpu.lock."""
    lines = (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


def test_the_base_install_is_small_and_brings_no_device_library():
    names = {canonicalize_name(item.name) for item in BASE}
    assert not names & {"triton", "transformers", "fastapi", "accelerate", "pyzmq"}
    assert len(names) <= 12


def test_triton_comes_only_by_the_extra_for_it():
    with_triton = {extra for extra, items in EXTRAS.items() for item in items if item.name == "triton"}
    assert with_triton == {"gpu"}


@pytest.mark.parametrize("item", [*BASE, *(item for items in EXTRAS.values() for item in items)], ids=str)
def test_metadata_gives_ranges_not_pins(item):
    assert all(part.operator in (">=", "<") for part in item.specifier)


@pytest.mark.parametrize("build", ["2.11.0", "2.13.0+cpu", "2.11.0+rocm7.0", "2.12.0a0+vendor.1"])
def test_any_vendors_torch_satisfies_the_base(build):
    torch = next(item for item in BASE if item.name == "torch")
    assert torch.specifier.contains(build, prereleases=True)


def test_the_lock_pins_what_every_extra_needs_but_the_devices():
    pins = lock()
    for extra, items in {"": BASE, **EXTRAS}.items():
        if extra in ("gpu", "dev"):
            continue
        for item in items:
            assert item.specifier.contains(pins[canonicalize_name(item.name)]), item


def test_the_lock_names_exact_public_versions():
    for name, version in lock().items():
        assert re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def test_entry_points_name_modules_that_exist():
    targets = [*PROJECT["scripts"].values(), *PROJECT["entry-points"]["octavo.backends"].values()]
    for target in targets:
        path = Path(*target.split(":")[0].split(".")[1:])
        assert (ROOT / path.with_suffix(".py")).is_file(), target


def test_one_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", octavo.__version__)
    assert f"## {octavo.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", ["core", "backends", "conformance"])
def test_links_lead_to_the_code(name):
    link = ROOT / "src" / "octavo" / name
    assert link.is_dir()
    assert link.resolve() == ROOT / name


def test_every_backend_of_the_tree_has_an_entry_point():
    plugins = {path.parent.name for path in (ROOT / "backends").glob("*/plugin.py")}
    assert PROJECT["entry-points"]["octavo.backends"] == {name: f"octavo.backends.{name}.plugin" for name in plugins}
