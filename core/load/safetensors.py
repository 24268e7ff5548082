"""A directory of safetensors files as a Checkpoint.

    config.json                         required
    generation_config.json              optional
    model.safetensors                   the weights in one file, or
    model.safetensors.index.json        {"weight_map": {tensor: file}} over several
    tokenizer.json, …                   passed on by path

The index and the files must tell the same story: each tensor in exactly the file the index names. Files are mapped,
not read; a tensor returned without `out` is a private view of the map, so a file must not be cut while it is in use.
Nothing is ever unpickled: a directory that holds only pytorch_model.bin is refused with the command that converts
it. `open_checkpoint` alone makes one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import CheckpointFormat, check_out, fingerprint_files, read_json
from octavo.core.load.readahead import ReadAhead, tensor_offsets

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("F32", "F16", "BF16")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
_DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32}
_DTYPE_BITS |= {"F32": 32, "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        # The remaining types, all flavours of F8, take a byte.
        return prod(self.shape) * _DTYPE_BITS.get(self.dtype, 8) // 8


class SafetensorsCheckpoint:
    """See `Checkpoint`. Opening reads headers only and imports no torch."""

    format: CheckpointFormat = "safetensors"
    norm_weights_include_one = False

    def __init__(self, path: Path) -> None:
        """Open a directory.

        Raises:
            CheckpointError: a file is missing or damaged, or index and files disagree.
        """
        self.path = path
        files, weight_map = _find_weights(path)
        self.config: Mapping[str, Any] = _read_config(path)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = read_json(generation) if generation.is_file() else {}
        self.metadata: Mapping[str, Any] = {}
        self._entries: dict[str, _TensorEntry] = {}
        for file in files:
            self._add_entries(file, weight_map)
        _check_index(path, weight_map, self._entries)
        self.total_bytes = sum(entry.num_bytes for entry in self._entries.values())
        self._files = files
        self._handles: dict[Path, Any] = {}
        self._ahead: dict[Path, tuple[ReadAhead, Mapping[str, tuple[int, int]]]] = {}

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_files([self.path / "config.json", *self._files])

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def stored_dtype(self, name: str) -> str:
        return self._entry(name).dtype

    def stored_bytes(self, name: str) -> int:
        return self._entry(name).num_bytes

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        entry = self._entry(name)
        if entry.dtype not in READABLE_DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is stored as {entry.dtype}; "
                f"only {', '.join(READABLE_DTYPES)} can be loaded as plain weights, and the config names no "
                "quantisation that this tensor belongs to: take the model's unquantised files",
                field=name,
            )
        tensor = self.read_stored(name)
        if out is None:
            return tensor
        check_out(name, entry.shape, out)
        return out.copy_(tensor)

    def read_stored(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        if entry.file not in self._handles:
            self._ahead[entry.file] = ReadAhead(entry.file), tensor_offsets(entry.file)
            self._handles[entry.file] = _open(entry.file, "pt")  # last: threads that share this look for it
        ahead, offsets = self._ahead[entry.file]
        ahead.touch(*offsets[name])
        try:
            tensor: torch.Tensor = self._handles[entry.file].get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is stored as {entry.dtype}, which can't be read ({error})", field=name
            ) from error
        return tensor

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.names() if names is None else names:
            yield name, self.read(name)

    def tokenizer_files(self) -> Mapping[str, Path]:
        return {name: self.path / name for name in TOKENIZER_FILES if (self.path / name).is_file()}

    def close(self) -> None:
        self._handles.clear()
        for ahead, _ in self._ahead.values():
            ahead.close()
        self._ahead.clear()

    def _entry(self, name: str) -> _TensorEntry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path} has no tensor {name}", field=name)
        return self._entries[name]

    def _add_entries(self, file: Path, weight_map: Mapping[str, str] | None) -> None:
        """Record a file's tensors, each of which the index must place in this very file."""
        handle = _open(file, "numpy")  # the header alone: no tensor is read through it
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            if weight_map is not None and weight_map.get(name) != file.name:
                told = f"says it is in {weight_map[name]}" if name in weight_map else "does not list it"
                raise CheckpointError(
                    f"{file} holds tensor {name} but {INDEX_FILE} {told}; index and files belong to different "
                    "versions: download the model again",
                    field=name,
                )
            piece = handle.get_slice(name)
            self._entries[name] = _TensorEntry(file, tuple(piece.get_shape()), piece.get_dtype())


def _open(file: Path, framework: str) -> Any:
    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        cause = str(error).splitlines()[0]
        raise CheckpointError(
            f"{file} is truncated or not a safetensors file ({cause}); download it again", field=file.name
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{path} has no config.json; download the model's configuration too", field="config.json")
    return read_json(config)


def _find_weights(path: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The weight files of a directory in the index's order, and the index if there is one."""
    if (path / INDEX_FILE).is_file():
        return _read_index(path)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE], None
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(
            f"{path} holds {len(found)} .safetensors files but neither {SINGLE_FILE} nor {INDEX_FILE}; "
            "download the index",
            field=INDEX_FILE,
        )
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} holds pickled weights only ({pickles[0]}), which can run code and are never loaded; where you "
            'trust them, convert them: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{path}').save_pretrained('{path}')\"",
            field=pickles[0],
        )
    raise CheckpointError(f"{path} holds no weights (no .safetensors file); give a model that has them")


def _read_index(path: Path) -> tuple[list[Path], Mapping[str, str]]:
    weight_map = read_json(path / INDEX_FILE).get("weight_map")
    well_formed = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not well_formed or not weight_map:
        raise CheckpointError(
            f"{path / INDEX_FILE} has no weight_map of file names; download it again", field=INDEX_FILE
        )
    shards = list(dict.fromkeys(weight_map.values()))
    for shard in shards:
        if not shard or Path(shard).name != shard:
            raise CheckpointError(
                f"{path / INDEX_FILE} names {shard!r}, which is no file of its directory; download it again",
                field=INDEX_FILE,
            )
        if not (path / shard).is_file():
            raise CheckpointError(
                f"{path} lacks the shard {shard} that {INDEX_FILE} names ({len(shards)} in all); download it",
                field=shard,
            )
    return [path / shard for shard in shards], weight_map


def _check_index(path: Path, weight_map: Mapping[str, str] | None, entries: Mapping[str, _TensorEntry]) -> None:
    """Refuse an index that names tensors its files don't hold."""
    for name, shard in (weight_map or {}).items():
        if name not in entries:
            raise CheckpointError(
                f"{path / shard} lacks tensor {name} that {INDEX_FILE} places there; index and files belong to "
                "different versions: download the model again",
                field=name,
            )
