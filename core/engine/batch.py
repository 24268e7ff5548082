"""The runner's mirror of the scheduler's running requests: one row each, so that a step's inputs are array work.

    row r   tokens[r, :length[r]]          every token id known so far (prompt, then outputs)
            computed[r]                    tokens whose KV is in the cache before the step
            offset[r]                      added to the positions that the model sees
            slot[r]                        the request's adapter slot; -1 for none
            second[r]                      where the second text of a pair begins; beyond every row where there is none
            tables[g][r, :num_blocks]      block ids of KV group g

Only the ModelRunner talks to it. It decides nothing: it applies each SchedulerOutput's differences, and could be
rebuilt from the scheduler at any time. Blocks that left a window stay named in a row; no kernel reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from octavo.core.sched.output import NewRequest, RunningRequest, SchedulerOutput

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GroupInputs:
    """What one KV group needs of a step, on the host: block_table [B, max_blocks] int32, slot_mapping [T] int64."""

    block_table: Int32
    slot_mapping: Int64


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's batch on the host.

    Attributes:
        request_ids: B ids, in row order of everything below.
        num_scheduled_B: tokens of each request in this step.
        num_known_B: tokens known of each request; the last of them is in this step where seq_lens_B is as many, and
            guesses behind it where seq_lens_B is more.
        token_ids_T, positions_T: int64, ragged, request after request; positions include each request's offset.
        query_start_loc: [B + 1] int32.
        seq_lens_B: int32, KV length including this step.
        groups: per KV group.
        adapter_T: int32, each token's adapter slot, -1 for none; None where nobody asks.
        masks, drafts: as in SchedulerOutput.
    """

    request_ids: tuple[str, ...]
    num_scheduled_B: Int64
    num_known_B: Int64
    token_ids_T: Int64
    positions_T: Int64
    query_start_loc: Int32
    seq_lens_B: Int32
    groups: tuple[GroupInputs, ...]
    adapter_T: Int32 | None = None
    masks: Mapping[str, bytes] = field(default_factory=dict)
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class InputBatch:
    """Rows of running requests.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens of a row.
        block_sizes: per KV group, in tokens.
        second_text_offset: added to positions in the second text of a pair.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int], *, second_text_offset: int = 0
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self._length = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._offset = np.zeros(max_num_seqs, dtype=np.int64)
        self._second = np.full(max_num_seqs, max_model_len, dtype=np.int64)
        self._slot = np.full(max_num_seqs, -1, dtype=np.int32)
        self._max_model_len = max_model_len
        self._second_text_offset = second_text_offset
        self._tables = [np.zeros((max_num_seqs, -(-max_model_len // s)), dtype=np.int32) for s in block_sizes]
        self._num_blocks = [[0] * max_num_seqs for _ in block_sizes]
        self._row_of: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))[::-1]

    def add(self, new: NewRequest, slot: int = -1) -> None:
        """Give a request that was admitted (or resumed) in this step a row; slot is its adapter's."""
        row = self._row_of[new.request_id] = self._free_rows.pop()
        self._tokens[row, : len(new.token_ids)] = new.token_ids
        self._length[row] = len(new.token_ids)
        self._computed[row] = new.num_computed_tokens
        self._offset[row] = new.rotary_offset
        self._slot[row] = slot
        second = None if new.pooling is None else new.pooling.first_segment_tokens
        self._second[row] = self._max_model_len if second is None else second
        for group, block_ids in enumerate(new.block_ids):
            self._num_blocks[group][row] = 0
            self._append_blocks(group, row, block_ids)

    def advance(self, running: RunningRequest) -> None:
        """Apply the differences of a request that has a row."""
        row = self._row_of[running.request_id]
        self._computed[row] = running.num_computed_tokens
        for group, block_ids in enumerate(running.new_block_ids):
            if block_ids:
                self._append_blocks(group, row, block_ids)

    def append_tokens(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Add sampled tokens to a row."""
        row = self._row_of[request_id]
        start = int(self._length[row])
        self._tokens[row, start : start + len(token_ids)] = token_ids
        self._length[row] = start + len(token_ids)

    def remove(self, request_id: str) -> None:
        """Free a row. Unknown ids are ignored: a request may end before it was ever scheduled."""
        if (row := self._row_of.pop(request_id, None)) is not None:
            self._free_rows.append(row)

    def prepare(self, scheduled: SchedulerOutput) -> StepInputs:
        """Gather a step's inputs, request after request in the scheduler's order."""
        for name, drafts in scheduled.drafts.items():
            row = self._row_of[name]
            known = int(self._length[row])
            self._tokens[row, known : known + len(drafts)] = drafts  # tokens that are drawn overwrite them
        ids = tuple(scheduled.num_scheduled_tokens)
        rows_B = np.fromiter((self._row_of[i] for i in ids), dtype=np.int64, count=len(ids))
        counts_B = np.fromiter(scheduled.num_scheduled_tokens.values(), dtype=np.int64, count=len(ids))
        starts = np.zeros(len(ids) + 1, dtype=np.int32)
        np.cumsum(counts_B, out=starts[1:])
        computed_B = self._computed[rows_B]
        rows_T = np.repeat(rows_B, counts_B)
        positions_T = np.arange(starts[-1]) + np.repeat(computed_B - starts[:-1], counts_B)
        seq_lens_B = (computed_B + counts_B).astype(np.int32)
        longest = int(seq_lens_B.max())
        return StepInputs(
            request_ids=ids,
            num_scheduled_B=counts_B,
            num_known_B=self._length[rows_B],
            token_ids_T=self._tokens[rows_T, positions_T].astype(np.int64),
            positions_T=positions_T + self._offsets(rows_T, positions_T),
            query_start_loc=starts,
            seq_lens_B=seq_lens_B,
            groups=tuple(
                self._group_inputs(table, size, rows_B, rows_T, positions_T, longest)
                for table, size in zip(self._tables, self._block_sizes, strict=True)
            ),
            adapter_T=self._slot[rows_T],
            masks=scheduled.masks,
            drafts=scheduled.drafts,
        )

    def _offsets(self, rows_T: Int64, positions_T: Int64) -> Int64:
        offset_T = self._offset[rows_T]
        if self._second_text_offset:
            offset_T += self._second_text_offset * (positions_T >= self._second[rows_T])
        return offset_T

    def _group_inputs(
        self, table: Int32, block_size: int, rows_B: Int64, rows_T: Int64, positions_T: Int64, longest: int
    ) -> GroupInputs:
        blocks_T = table[rows_T, positions_T // block_size].astype(np.int64)
        width = -(-longest // block_size)
        return GroupInputs(
            block_table=np.ascontiguousarray(table[rows_B, :width]),
            slot_mapping=blocks_T * block_size + positions_T % block_size,
        )

    def _append_blocks(self, group: int, row: int, block_ids: Sequence[int]) -> None:
        start = self._num_blocks[group][row]
        self._tables[group][row, start : start + len(block_ids)] = block_ids
        self._num_blocks[group][row] = start + len(block_ids)
