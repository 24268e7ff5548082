"""Streaming weights: name -> target -> place, one tensor at a time.

    checkpoint.tensors(names)  ──  name, tensor  ──>  target.place(tensor)  ──>  next name

A model says what it wants as a dict of `WeightTarget`s, in the order it wants them; whatever it fuses (q, k and v in
one matrix) or shards is its own business, done by packing each part where it belongs. Everything is checked by name and
shape before the first byte is read. At no time does this module hold more than the one tensor being placed, so host
memory peaks at the model's own weights plus the largest tensor.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import CheckpointError

if TYPE_CHECKING:
    from octavo.core.load.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Where one checkpoint tensor goes.

    Attributes:
        shape: the shape the model expects.
        place: copies what it needs of the tensor and changes nothing; the tensor's memory serves the next one. It gets
            the stored dtype (float32 for GGUF's quantised types), or a QuantizedTensor where the checkpoint has one.
        required: whether a checkpoint without this tensor is an error (a tied output head is not required).
        other_shapes: that are accepted, too.
    """

    shape: tuple[int, ...]
    place: Callable[[Any], None]
    required: bool = True
    other_shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading did.

    Attributes:
        placed: names of the tensors placed, in order.
        absent: names that were not required and are not in the checkpoint.
        unused: names in the checkpoint that the model did not ask for (also logged).
        stored_bytes: bytes of the placed tensors in the file.
        seconds: wall time.
    """

    placed: tuple[str, ...]
    absent: tuple[str, ...]
    unused: tuple[str, ...]
    stored_bytes: int
    seconds: float


def load_weights(
    checkpoint: Checkpoint,
    targets: Mapping[str, WeightTarget],
    *,
    progress: bool | None = None,
    left_out: Collection[str] = (),
) -> LoadReport:
    """Read every tensor the model wants, in the order of `targets`, and place it.

    Args:
        checkpoint: the opened files.
        targets: checkpoint name -> where it goes.
        progress: show a progress bar on stderr; None shows it on a terminal.
        left_out: names that the model does without on purpose; no warning speaks of them.

    Raises:
        CheckpointError: a required tensor is missing, or a tensor has another shape; nothing was placed then.
    """
    started = time.perf_counter()
    placed = check_targets(checkpoint, targets)
    absent = tuple(name for name in targets if name not in placed)
    unused = tuple(name for name in checkpoint.names() if name not in targets and name not in left_out)
    if unused:
        logger.warning(
            "%d tensors of %s are not used by the model: %s", len(unused), checkpoint.path, ", ".join(unused)
        )
    wanted = {name: targets[name] for name in placed}
    if progress if progress is not None else sys.stderr.isatty():
        _drive_with_bar(checkpoint, wanted)
    else:
        for _ in stream_weights(checkpoint, wanted):
            pass
    return LoadReport(
        placed=placed,
        absent=absent,
        unused=unused,
        stored_bytes=sum(checkpoint.stored_bytes(name) for name in placed),
        seconds=time.perf_counter() - started,
    )


def check_targets(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> tuple[str, ...]:
    """Compare names and shapes, reading nothing; return the names to read, in the order of `targets`.

    Raises:
        CheckpointError: naming the tensor, the shape expected and the shape found.
    """
    in_file = set(checkpoint.names())
    missing = [name for name, target in targets.items() if target.required and name not in in_file]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path} has no tensor {missing[0]} of shape {list(targets[missing[0]].shape)}{more}; "
            "the files are incomplete or belong to another model: download them again",
            field=missing[0],
        )
    present = tuple(name for name in targets if name in in_file)
    for name in present:
        expected, found = tuple(targets[name].shape), checkpoint.shape(name)
        if found != expected and found not in targets[name].other_shapes:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {name} has shape {list(found)} where the config asks for "
                f"{list(expected)}; the config and the weights belong to different models",
                field=name,
            )
    return present


def stream_weights(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> Iterator[str]:
    """Read and place the targets one by one, yielding each name when its tensor is placed.

    The targets must have passed `check_targets`.
    """
    for name, tensor in checkpoint.tensors(targets):
        targets[name].place(tensor)
        yield name


def _drive_with_bar(checkpoint: Checkpoint, targets: Mapping[str, WeightTarget]) -> None:
    from tqdm import tqdm

    total_bytes = sum(checkpoint.stored_bytes(name) for name in targets)
    with tqdm(total=total_bytes, desc="Loading", unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        for name in stream_weights(checkpoint, targets):
            bar.update(checkpoint.stored_bytes(name))
