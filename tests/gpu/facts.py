"""`make gpu-check`, first step: the machine, what Python finds on it, and the device as the backend declares it."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("msgspec", "numpy", "pluggy", "safetensors", "torch", "tokenizers", "jinja2", "yaml", "tqdm")
WANTED = ("triton", "transformers", "xxhash", "huggingface_hub")


def main() -> int:
    """Write what is found. Returns 1 when a module is missing or the backend can't be had."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    backend: str = parser.parse_args().backend
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "compiler": next((c for c in ("g++", "c++", "clang++") if shutil.which(c)), None),
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "missing": missing,
        **{name: version_of(name) for name in (*NEEDED, *WANTED)},
        "git": said("git", "rev-parse", "HEAD"),
        "driver": said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
        or said("rocm-smi", "--showproductname", "--csv"),
    }
    faults = [f"no module {name}: make gpu-wheels puts a wheel into build/wheels" for name in missing]
    if not missing:
        faults += device_facts(backend, found)
    found["faults"] = faults
    (ROOT / "build/gpu-check/facts.json").write_text(json.dumps(found, indent=1) + "\n")
    return int(bool(faults))


def device_facts(name: str, found: dict[str, Any]) -> list[str]:
    """What the backend declares; faults when it can't be made."""
    import msgspec

    from octavo.conformance.facts import Facts
    from octavo.core.backend import BackendRegistry
    from octavo.core.base.errors import OctavoError

    registry = BackendRegistry.discover()
    try:
        info = registry.choose(name)
        device = registry.create(info, {})
    except OctavoError as error:
        return [str(error)]
    memory = device.memory_info()
    found |= {
        "device": device.capabilities.device_name,
        "capabilities": msgspec.to_builtins(Facts.of(device.capabilities)),
        "free_bytes": memory.free_bytes,
        "total_bytes": memory.total_bytes,
        "builds": info.builds is not None,
    }
    device.close()
    return []


def version_of(name: str) -> str | None:
    """Of the distribution that brings a module."""
    try:
        return importlib.metadata.version({"yaml": "pyyaml"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "there" if importlib.util.find_spec(name) else None


def said(*words: str) -> str | None:
    """A program's answer; None without one."""
    try:
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    sys.exit(main())
