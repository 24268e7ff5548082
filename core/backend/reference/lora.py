"""Low-rank adapters: out[t] += scale * B @ (A @ x[t]) with the adapter of each row."""

from __future__ import annotations

import torch

from octavo.core.backend.reference.numeric import accumulator


def lora_gemm(
    x_TK: torch.Tensor,
    a: list[torch.Tensor],
    b: list[torch.Tensor],
    scales: torch.Tensor,
    adapter_T: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """a[i] [rank, K], b[i] [N, rank], scales [number of adapters]; rows of adapter -1 stay bit for bit."""
    for i, (a_RK, b_NR) in enumerate(zip(a, b, strict=True)):
        rows = (adapter_T == i).nonzero().squeeze(1)
        if rows.numel() == 0:
            continue
        acc = accumulator(x_TK, a_RK, b_NR)
        delta = x_TK[rows].to(acc) @ a_RK.to(acc).T @ b_NR.to(acc).T * scales[i].to(acc)
        out[rows] = (out[rows].to(acc) + delta).to(out.dtype)
