"""What exactly was tested: the plug-in's package, the source that it was imported from, and the software below it.

    BackendInfo.distribution ──► version, RECORD digest       of the installed wheel, where there is one
    BackendInfo.factory      ──► folder of its source ──► git commit and dirty flag, where git tracks that folder

Nothing here imports the backend, and whatever can't be found is None, never guessed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from octavo.core.backend import BackendInfo

GIT_TIMEOUT_S = 10.0


class PlugIn(msgspec.Struct, frozen=True, kw_only=True):
    """The package that brings the backend.

    Attributes:
        version: of the installed distribution.
        git: commit of the source tree that the factory lies in.
        dirty: whether tracked files of that folder differ from the commit.
        record_sha256: of the installed distribution's RECORD, which lists the hash of every file of the wheel.
    """

    distribution: str
    version: str | None
    git: str | None
    dirty: bool | None
    record_sha256: str | None


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of what lies below. device: driver, firmware and the like, as the backend names them."""

    octavo: str
    python: str
    platform: str
    torch: str
    triton: str | None
    device: dict[str, str]


def plug_in(info: BackendInfo) -> PlugIn:
    """Where a backend comes from."""
    git, dirty = _git(package_folder(info))
    version, digest = _installed(info.distribution)
    return PlugIn(distribution=info.distribution, version=version, git=git, dirty=dirty, record_sha256=digest)


def software(device: Mapping[str, str]) -> Software:
    """The versions that this process sees."""
    from octavo import __version__

    return Software(
        octavo=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        torch=str(torch.__version__),
        triton=_installed("triton")[0],
        device=dict(device),
    )


def package_folder(info: BackendInfo) -> Path | None:
    """The folder of the package that holds a backend's factory; None when it has none on disk."""
    module = info.factory.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent


def _installed(distribution: str) -> tuple[str | None, str | None]:
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None, None
    record = found.read_text("RECORD")
    return found.version, None if record is None else hashlib.sha256(record.encode()).hexdigest()


def _git(folder: Path | None) -> tuple[str | None, bool | None]:
    """Commit and dirty flag; nothing when git doesn't track the folder (an installed copy inside a checkout)."""
    if folder is None or not _run_git(folder, "ls-files", "."):
        return None, None
    commit, changes = _run_git(folder, "rev-parse", "HEAD"), _run_git(folder, "status", "--porcelain", "-uno", ".")
    return commit, None if changes is None else bool(changes)


def _run_git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
