"""What a checkpoint is to the rest of the engine, whatever its file format.

    Checkpoint
    ├── config, generation_config     as Hugging Face's config.json and generation_config.json name things
    ├── names(), shape(), stored_*    every tensor in the files, under its Hugging Face name; nothing read yet
    ├── read(), tensors()             one tensor at a time, from a memory map
    └── tokenizer_files(), metadata   raw material for core/text: files of a directory, or GGUF keys

Models and tools see only this protocol; `safetensors.py` and `gguf.py` implement it, and `open_checkpoint` alone
chooses between them. A checkpoint owns its memory maps. It never unpickles and never runs code from a model directory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from octavo.core.base.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from octavo.core.backend.quant import QuantizedTensor

CheckpointFormat = Literal["safetensors", "gguf"]

FINGERPRINT_SAMPLES = 256
FINGERPRINT_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files lie on this machine.

    Attributes:
        name: what the user typed.
        path: a directory with safetensors files, or one `.gguf` file.
        format: which reader opens it.
    """

    name: str
    path: Path
    format: CheckpointFormat


class Checkpoint(Protocol):
    """A model's files, opened. All names are Hugging Face's; shapes are torch's (rows first).

    Attributes:
        path: the directory or file, for messages.
        format: "safetensors" or "gguf".
        config: config.json's content, or its equivalent made from GGUF metadata.
        generation_config: generation_config.json's content or equivalent; empty when there is none.
        metadata: the GGUF keys (`tokenizer.ggml.tokens`, `tokenizer.chat_template`, …), decoded when asked for;
            empty for safetensors.
        norm_weights_include_one: whether a norm that multiplies by (1 + weight), like Gemma's, is stored with
            the 1 already added (GGUF) or without (safetensors).
        total_bytes: bytes of all tensors as stored.
    """

    @property
    def path(self) -> Path: ...

    @property
    def format(self) -> CheckpointFormat: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def generation_config(self) -> Mapping[str, Any]: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def norm_weights_include_one(self) -> bool: ...

    @property
    def total_bytes(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """A hex digest of headers, sizes and samples of the data: equal for copies, cheap at any size."""
        ...

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        ...

    def stored_dtype(self, name: str) -> str:
        """How a tensor is stored: "F32", "F16", "BF16", or a quantised type such as "Q4_K"."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Bytes a tensor takes in the file."""
        ...

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor | QuantizedTensor:
        """Read one tensor.

        Args:
            name: one of `names()`.
            out: where to put it, in host memory, contiguous, of the tensor's shape; values are rounded to its dtype.
                None gives a tensor of the stored dtype (float32 for quantised types) that the caller may keep but
                not change: it may be a view of the file.

        Returns:
            `out`, or the new tensor. A checkpoint that `open_quantized` wrapped gives a QuantizedTensor for what is
            stored so, and dequantises it into `out` where there is one.

        Errors: CheckpointError when the stored type is not supported or the file is damaged.
        """
        ...

    def read_stored(self, name: str) -> torch.Tensor:
        """One tensor's elements as they are stored, of any dtype, for readers of quantised layers.

        A quantised type of GGUF gives its blocks' bytes, uint8 [rows, row bytes], in Hugging Face's order of rows. The
        tensor may be a view of the file: it must not be changed.

        Errors: CheckpointError when the dtype has no counterpart in torch or the file is damaged.
        """
        ...

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor | QuantizedTensor]]:
        """Yield (name, tensor) in the order given (default: file order).

        One tensor at a time: each is valid until the next is asked for, and must not be changed.
        """
        ...

    def tokenizer_files(self) -> Mapping[str, Path]:
        """The tokenizer and chat-template files of a directory by file name; empty for GGUF (see `metadata`)."""
        ...

    def close(self) -> None:
        """Release threads and open files; nothing can be read any more, but what was returned stays valid."""
        ...


def open_checkpoint(source: ModelSource, *, num_threads: int | None = None) -> Checkpoint:
    """Open a model's files and check everything that can be checked without reading the weights.

    Args:
        source: from `resolve_model`.
        num_threads: threads that dequantise; None takes the processors this process may use.

    Raises:
        CheckpointError: files are missing, damaged or of an unsupported kind.
    """
    if source.format == "gguf":
        from octavo.core.load.gguf import GGUFCheckpoint

        return GGUFCheckpoint(source.path, num_threads=num_threads)
    from octavo.core.load.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(source.path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model directory.

    Raises:
        CheckpointError: the file can't be read, or is not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}", field=path.name) from error
    except (ValueError, RecursionError) as error:
        cause = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is not valid JSON ({cause}); download it again", field=path.name) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object", field=path.name)
    return value


def check_out(name: str, shape: tuple[int, ...], out: torch.Tensor) -> None:
    """Refuse a buffer into which a tensor can't be read as it is; a mistake of the caller, not of the user."""
    if tuple(out.shape) != shape or not out.is_contiguous():
        raise ValueError(f"out for {name} must be contiguous of shape {shape}, not {tuple(out.shape)}")


def fingerprint_files(paths: Iterable[Path]) -> str:
    """A digest of each file's size, its first bytes and samples spread evenly over the rest.

    Copies have the same digest; models of one shape that were trained differently differ in nearly every sample.
    It is an identity for caches, not a proof against somebody who forges files.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(size_bytes.to_bytes(8, "little"))
            for sample in range(FINGERPRINT_SAMPLES):
                file.seek(size_bytes * sample // FINGERPRINT_SAMPLES)
                digest.update(file.read(FINGERPRINT_SAMPLE_BYTES))
    return digest.hexdigest()
