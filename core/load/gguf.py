"""A GGUF file as a Checkpoint: Hugging Face's names, shapes and config over one memory-mapped file.

    gguf_file.py    the container: keys, tensor table            (no torch)
    gguf_names.py   names, config fields                         (no torch)
    gguf_quants.py  blocks -> float32
    gguf.py         ties them together; `open_checkpoint` alone makes one

Quantised tensors are widened while they are read, by as many threads as there are processors, straight into the
memory they are wanted in. The reordered rows of q and k are put back while they are still packed, which moves the
fewest bytes.
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
from octavo.core.load.gguf_file import GGUFFile, TensorInfo
from octavo.core.load.gguf_names import architecture_of, hf_config, hf_names, token_ids

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
        self._gguf_names = hf_names(self._file, architecture)
        self._permutes_qk = architecture.permutes_qk
        self.config: Mapping[str, Any] = hf_config(self._file, architecture)
        self.generation_config: Mapping[str, Any] = token_ids(self._file)
        self.metadata: Mapping[str, Any] = self._file.metadata
        self.total_bytes = sum(tensor.num_bytes for tensor in self._file.tensors.values())
        self._num_threads = min(num_threads or usable_cores(), MAX_THREADS)
        self._executor = ThreadPoolExecutor(max(1, self._num_threads - 1), thread_name_prefix="octavo-load")

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_files([self.path])

    def names(self) -> tuple[str, ...]:
        return tuple(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def stored_dtype(self, name: str) -> str:
        return self._info(name).type.name

    def stored_bytes(self, name: str) -> int:
        return self._info(name).num_bytes

    def read(self, name: str, out: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        from octavo.core.load.gguf_quants import dequantize

        info = self._info(name)
        packed = self._packed(name, info)
        if out is None:
            out = torch.empty(info.shape, dtype=_dtype(info))
        else:
            check_out(name, info.shape, out)
        if info.type.name in PLAIN_DTYPES:
            _copy_plain(packed, _dtype(info), out)
        else:
            dequantize(packed, info.type, out, executor=self._executor, num_threads=self._num_threads)
        return out

    def read_stored(self, name: str) -> torch.Tensor:
        import torch

        info = self._info(name)
        if info.type.name in PLAIN_DTYPES:
            return self.read(name)
        packed = torch.from_numpy(self._packed(name, info).copy())
        return packed.view(info.shape[0], -1) if len(info.shape) > 1 else packed.view(1, -1)

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        wanted = list(self.names() if names is None else names)
        # One piece of memory for all: fresh memory for each would cost more than dequantising into it.
        sizes = [math.prod(self.shape(name)) * _dtype(self._info(name)).itemsize for name in wanted]
        staging = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for name, num_bytes in zip(wanted, sizes, strict=True):
            out = staging[:num_bytes].view(_dtype(self._info(name))).view(self.shape(name))
            yield name, self.read(name, out)

    def tokenizer_files(self) -> Mapping[str, Path]:
        return {}

    def close(self) -> None:
        self._executor.shutdown()

    def _info(self, name: str) -> TensorInfo:
        if name not in self._gguf_names:
            raise CheckpointError(f"{self.path} has no tensor {name}", field=name)
        return self._file.tensors[self._gguf_names[name]]

    def _packed(self, name: str, info: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes, its rows in Hugging Face's order."""
        import numpy as np

        packed = np.frombuffer(self._file.data, np.uint8, info.num_bytes, info.start)
        heads = self._heads_to_unpermute(name)
        if heads == 0:
            return packed
        rows = info.shape[0]
        if rows % (2 * heads) or (len(info.shape) == 1 and info.type.block_elements > 1):
            raise CheckpointError(
                f"{self.path}: {name} has {rows} rows, which {heads} heads can't share evenly; the file is damaged",
                field=name,
            )
        by_pair = packed.reshape(heads, rows // heads // 2, 2, info.num_bytes // rows)
        return np.ascontiguousarray(by_pair.swapaxes(1, 2)).reshape(-1)

    def _heads_to_unpermute(self, name: str) -> int:
        """How many heads a reordered tensor has; 0 when its rows are in order."""
        if not self._permutes_qk:
            return 0
        if ".q_proj." in name:
            return int(self.config["num_attention_heads"])
        return int(self.config["num_key_value_heads"]) if ".k_proj." in name else 0


def _dtype(info: TensorInfo) -> torch.dtype:
    """What a tensor is read as: its own type where that is a float type, else float32."""
    import torch

    dtype: torch.dtype = getattr(torch, PLAIN_DTYPES.get(info.type.name, "float32"))
    return dtype


def _copy_plain(packed: npt.NDArray[np.uint8], dtype: torch.dtype, out: torch.Tensor) -> None:
    """Copy elements that are stored unpacked, rounding them to out's dtype."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        out.view(-1).copy_(torch.frombuffer(packed, dtype=dtype))
