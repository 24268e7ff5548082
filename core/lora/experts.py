"""Adapters of a layer's experts: slots of every local expert, and which of them each sorted row uses.

    rows sorted by expert   |expert 0|expert 1 ····|expert 2 ··|  tail of no expert
    token of each row       3 0      0 1 5 2        7 3 1         0 0            moe_permute's out_rows
    slot of its token       1 -1     -1 2 1 2       0 1 2         · ·            adapter_T
    member of a part        1·E+0 -1  -1 2·E+1 …    0·E+2 …       -1 -1          what `add` takes

The slots are stacked as [slots · E]: one call serves all experts and all adapters.
"""

from __future__ import annotations

import torch

from octavo.core.lora.parts import LoraPart, ProductAdapters


class ExpertAdapters:
    """The adapters of two grouped products.

    Args:
        up: parts of the first, gate before up.
        down: part of the second.
    """

    def __init__(self, up: list[LoraPart], down: LoraPart) -> None:
        self.up = ProductAdapters(up)
        self.down = ProductAdapters([down])
        self._parts = (*up, down)
        self._num_experts = len(down.shape.names)

    def members(
        self, adapter_T: torch.Tensor, rows_N: torch.Tensor, segment_start: torch.Tensor
    ) -> torch.Tensor | None:
        """[N] int32, what `up.add` and `down.add` take for each sorted row; None where no adapter has experts.

        Args:
            adapter_T: slot of each token, -1 for none.
            rows_N: token of each sorted row.
            segment_start: [E + 1], the first sorted row of each expert.
        """
        if not any(part.is_ready for part in self._parts):
            return None
        slot_N = adapter_T.index_select(0, rows_N)
        places_N = torch.arange(len(rows_N), device=segment_start.device, dtype=segment_start.dtype)
        expert_N = torch.searchsorted(segment_start[1:], places_N, right=True, out_int32=True)
        has_none_N = (slot_N < 0) | (expert_N >= self._num_experts)
        return (slot_N * self._num_experts + expert_N).masked_fill_(has_none_N, -1)
