"""The last steps from a pooled vector to what a request gets, in fp32 on the host."""

from __future__ import annotations

import torch

from octavo.core.base.pooling import PoolingJob
from octavo.core.pool.pooler import LabelActivation, Pooler

_SMALLEST_LENGTH = 1e-12


def finished(vector_N: torch.Tensor, pooler: Pooler, job: PoolingJob) -> torch.Tensor:
    """An embedding cut, then normalised; or a classifier's logits, activated.

    Args:
        vector_N: fp32, after pooling and the pooler's layers.
    """
    if pooler.task == "classify":
        return activated(vector_N, pooler.activation) if job.activate else vector_N
    vector_N = vector_N[: job.dimensions]
    return vector_N / vector_N.norm().clamp(min=_SMALLEST_LENGTH) if job.normalize else vector_N


def activated(logits_N: torch.Tensor, activation: LabelActivation) -> torch.Tensor:
    """softmax, sigmoid or nothing."""
    if activation == "softmax":
        return logits_N.softmax(dim=-1)
    return logits_N.sigmoid() if activation == "sigmoid" else logits_N
