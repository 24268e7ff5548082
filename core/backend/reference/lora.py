"""Low-rank adapters: out[t] += scale * B @ (A @ x[t]) with the adapter of each row."""

from __future__ import annotations

import torch

from octavo.core.backend.reference.numeric import accumulator


def lora_gemm(
    x_TK: torch.Tensor,
    a_LRK: torch.Tensor,
    b_LNR: torch.Tensor,
    scales_L: torch.Tensor,
    adapter_T: torch.Tensor,
    *,
    out: torch.Tensor,
) -> None:
    """Rows of adapter -1 stay bit for bit. Asks the device which slots are used, and multiplies no others."""
    acc = accumulator(x_TK, a_LRK, b_LNR)
    for slot in adapter_T.unique().tolist():
        if slot < 0:
            continue
        rows = (adapter_T == slot).nonzero().squeeze(1)
        h = x_TK[rows].to(acc) @ a_LRK[slot].to(acc).T
        delta = h @ b_LNR[slot].to(acc).T * scales_L[slot].to(acc)
        out[rows] = (out[rows].to(acc) + delta).to(out.dtype)
