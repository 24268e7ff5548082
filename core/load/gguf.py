"""A GGUF file as a Checkpoint: Hugging Face's names, shapes and config over one memory-mapped file.

    gguf_file.py    the container: keys, tensor table            (no torch)
    gguf_names/     names, config fields, what a tensor is made of   (no torch)
    gguf_quants.py  blocks -> float32
    gguf.py         ties them together; `open_checkpoint` alone makes one

Quantised tensors are widened while they are read, by as many threads as there are processors, straight into the
memory they are wanted in. Rows that a file holds in another order are put back while they are still packed, which
moves the fewest bytes, and an expert is a slice of the tensor that holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import CheckpointError
from octavo.core.base.host import usable_cores
from octavo.core.load.checkpoint import CheckpointFormat, check_out, fingerprint_files
from octavo.core.load.gguf_file import GGUFFile
from octavo.core.load.gguf_names.config import hf_config
from octavo.core.load.gguf_names.names import hf_views
from octavo.core.load.gguf_names.table import architecture_of
from octavo.core.load.gguf_names.tokens import token_ids
from octavo.core.load.gguf_names.views import Piece, View
from octavo.core.load.gguf_types import GGMLType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

MAX_THREADS = 16

PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types stored as they are used, by torch's names."""


class GGUFCheckpoint:
    """See `Checkpoint`. Opening reads the header only and imports no torch."""

    format: CheckpointFormat = "gguf"
    norm_weights_include_one = True

    def __init__(self, path: Path, *, num_threads: int | None = None) -> None:
        """Open a file.

        Raises:
            CheckpointError: it is damaged, of an unknown architecture, or holds what can't be translated.
        """
        self.path = path
        self._file = GGUFFile(path)
        architecture = architecture_of(self._file)
        self.config: Mapping[str, Any] = hf_config(self._file, architecture)
        self._views = hf_views(self._file, architecture, self.config)
        self.generation_config: Mapping[str, Any] = token_ids(self._file)
        self.metadata: Mapping[str, Any] = self._file.metadata
        self.total_bytes = sum(tensor.num_bytes for tensor in self._file.tensors.values())
        self._num_threads = min(num_threads or usable_cores(), MAX_THREADS)
        self._executor = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="octavo-load")

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_files([self.path])

    def names(self) -> tuple[str, ...]:
        return tuple(self._views)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._view(name).shape

    def stored_dtype(self, name: str) -> str:
        return self._view(name).type_name

    def stored_bytes(self, name: str) -> int:
        return self._view(name).num_bytes

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        view = self._view(name)
        if out is None:
            out = torch.empty(view.shape, dtype=_dtype(view))
        else:
            check_out(name, view.shape, out)
        if view.is_packed:
            self._widen(self._packed(view), view.pieces[0].tensor.type, out)
        else:
            parts = [self._elements(piece).numpy() for piece in view.pieces]
            out.view(-1).copy_(torch.from_numpy(view.order.arrange(parts).reshape(-1)))
        return out

    def read_stored(self, name: str) -> torch.Tensor:
        import torch

        view = self._view(name)
        if view.type_name in PLAIN_DTYPES:
            return self.read(name)
        packed = torch.from_numpy(self._packed(view).copy())
        return packed.view(view.shape[0], -1) if len(view.shape) > 1 else packed.view(1, -1)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        wanted = list(self.names() if names is None else names)
        # One piece of memory for all: fresh memory for each would cost more than dequantising into it.
        sizes = [math.prod(self.shape(name)) * _dtype(self._view(name)).itemsize for name in wanted]
        staging = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for name, num_bytes in zip(wanted, sizes, strict=True):
            out = staging[:num_bytes].view(_dtype(self._view(name))).view(self.shape(name))
            yield name, self.read(name, out)

    def tokenizer_files(self) -> Mapping[str, Path]:
        return {}

    def close(self) -> None:
        self._executor.shutdown()

    def _view(self, name: str) -> View:
        if name not in self._views:
            raise CheckpointError(f"{self.path} has no tensor {name}", field=name)
        return self._views[name]

    def _packed(self, view: View) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, its rows in Hugging Face's order."""
        import numpy as np

        parts = [self._bytes(piece).reshape(piece.count, piece.unit_bytes) for piece in view.pieces]
        arranged = np.ascontiguousarray(view.order.arrange(parts)).reshape(-1)
        return arranged.view(np.uint8)

    def _elements(self, piece: Piece) -> torch.Tensor:
        """A piece widened, fp32 [units, elements]."""
        import torch

        out = torch.empty(piece.count, piece.unit_elements)
        self._widen(self._bytes(piece), piece.tensor.type, out)
        return out

    def _bytes(self, piece: Piece) -> npt.NDArray[np.uint8]:
        import numpy as np

        return np.frombuffer(self._file.data, np.uint8, piece.num_bytes, piece.start)

    def _widen(self, packed: npt.NDArray[np.uint8], kind: GGMLType, out: torch.Tensor) -> None:
        """Elements as they are stored into `out`, rounded to its dtype."""
        from octavo.core.load.gguf_quants import dequantize

        if kind.name in PLAIN_DTYPES:
            _copy_plain(packed, _torch_dtype(kind.name), out)
        else:
            dequantize(packed, kind, out, executor=self._executor, num_threads=self._num_threads)


def _dtype(view: View) -> torch.dtype:
    """What a tensor is read as: its own type where that is a float type, else float32."""
    return _torch_dtype(view.type_name)


def _torch_dtype(type_name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, PLAIN_DTYPES.get(type_name, "float32"))
    return dtype


def _copy_plain(packed: npt.NDArray[np.uint8], dtype: torch.dtype, out: torch.Tensor) -> None:
    """Copy elements that are stored unpacked, rounding them to out's dtype."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        out.view(-1).copy_(torch.frombuffer(packed, dtype=dtype))
