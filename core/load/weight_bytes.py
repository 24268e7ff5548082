"""How many bytes a checkpoint's weights will take on the device, from its header alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from octavo.core.load.checkpoint import Checkpoint


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype, num_ranks: int = 1) -> int:
    """Bytes of every tensor once: vectors (norms, biases) in fp32, all others stored in `dtype`.

    An output head that the config ties to the embedding is not counted, should the file hold it. Of `num_ranks` that
    share a model each has the vectors and a part of all others; the few that are kept whole make it a little more.
    """
    tied = checkpoint.config.get("tie_word_embeddings") is True
    shapes = (checkpoint.shape(name) for name in checkpoint.names() if not (tied and name == "lm_head.weight"))
    total = sum(math.prod(shape) * (4 if len(shape) == 1 else dtype.itemsize / num_ranks) for shape in shapes)
    return math.ceil(total)
