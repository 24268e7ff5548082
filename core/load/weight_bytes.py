"""How many bytes a checkpoint's weights will take on the device, from its header alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from octavo.core.load.checkpoint import Checkpoint


def weight_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    num_ranks: int = 1,
    *,
    of_matrix: Callable[[str, tuple[int, ...]], float] | None = None,
) -> int:
    """Bytes of every tensor once: vectors (norms, biases) in fp32, all others stored in `dtype`.

    An output head that the config ties to the embedding is not counted, should the file hold it. Of `num_ranks` that
    share a model each has the vectors and a part of all others; the few that are kept whole make it a little more.

    Args:
        of_matrix: tells the bytes of a tensor that is no vector, by name and shape, where it is not in `dtype`.
    """
    tied = checkpoint.config.get("tie_word_embeddings") is True
    total = 0.0
    for name in checkpoint.names():
        shape = checkpoint.shape(name)
        if len(shape) == 1:
            total += math.prod(shape) * 4
        elif not (tied and name == "lm_head.weight"):
            whole = math.prod(shape) * dtype.itemsize if of_matrix is None else of_matrix(name, shape)
            total += whole / num_ranks
    return math.ceil(total)
