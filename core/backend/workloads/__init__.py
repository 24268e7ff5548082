"""Calls of ops at the shapes of models that people run, in the contract's own words.

    llama8b     32 query heads over 8 KV heads of 128      gemma       heads of 256, window and softcap
    sinks       64 heads of 64 with sinks, window 128      deepseek    latent attention, 16 heads a rank
    qwen-moe    128 experts, 8 of them for a token         m64         64 tokens at once

They are built ahead of time, timed (profile `perf`) and tuned. A workload knows what it must move and multiply at the
least; how long that takes at a device's limits is the reader's division.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.core.backend.workloads import attention, products, rows
from octavo.core.backend.workloads.base import Cost, Prepared, Tensors, Workload

__all__ = ["Cost", "Prepared", "Tensors", "Workload", "list_workloads"]


def list_workloads(dtype: torch.dtype, fp8: torch.dtype | None) -> Iterator[Workload]:
    """All of them.

    Args:
        dtype: of activations, plain weights and plain KV.
        fp8: the device's 8-bit float; None where it has none.
    """
    yield from attention.list_workloads(dtype, fp8)
    yield from products.list_workloads(dtype, fp8)
    yield from rows.list_workloads(dtype, fp8)
