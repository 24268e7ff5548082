"""Shapes of a step, for devices that take only a few: what the runner pads to.

    dynamic shapes     T and R as they are; request tensors hold B rows
    token buckets      T up to the next bucket; R and the rows of request tensors follow from it: min(T, max_num_seqs),
                       or R = T in a step that scores prompts

    token_ids      | real tokens .......... | 0 0 0 |      padding tokens belong to no request
    slot_mapping   | slots ................ | -1 -1 |      and write nothing
    seq_lens       | real requests .. | 0 0 0 0 0 0 |      padding requests have no token: query_start_loc repeats T
    adapter        | slots ................ | -1 -1 |      and run with no adapter
    block_table    | real requests .. | 0 0 0 0 0 0 |      as wide as max_model_len, so that it never grows

Rows that no request owns hold whatever was there: no op mixes rows, so nothing of them reaches a real one. Only the
ModelRunner pads; schedulers, models and samplers never see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from octavo.core.backend.device import Capabilities
from octavo.core.engine.batch import GroupInputs, StepInputs

Item = TypeVar("Item", np.int32, np.int64)


@dataclass(frozen=True, slots=True)
class StepShapes:
    """What a step is padded to on one device.

    Attributes:
        token_buckets: ascending; empty where shapes are dynamic, and then nothing is padded.
        max_num_seqs: the most requests of a step.
        table_widths: block table columns of a padded step, per KV group.
    """

    token_buckets: tuple[int, ...]
    max_num_seqs: int
    table_widths: tuple[int, ...]

    @property
    def are_dynamic(self) -> bool:
        """Whether the device takes any shape."""
        return not self.token_buckets

    def logit_rows(self, num_rows: int, num_tokens: int) -> int:
        """R of a step in which so many rows are wanted and T is num_tokens."""
        if self.are_dynamic:
            return num_rows
        usual = min(num_tokens, self.max_num_seqs)
        return usual if num_rows <= usual else num_tokens

    def pad(self, inputs: StepInputs) -> StepInputs:
        """The inputs in a shape that the device takes; request_ids and counts stay those of the real requests."""
        if self.are_dynamic:
            return inputs
        num_tokens = padded_tokens(self.token_buckets, len(inputs.token_ids_T))
        num_requests = min(num_tokens, self.max_num_seqs)
        return replace(
            inputs,
            token_ids_T=_longer(inputs.token_ids_T, num_tokens),
            positions_T=_longer(inputs.positions_T, num_tokens),
            query_start_loc=_longer(inputs.query_start_loc, num_requests + 1, fill=inputs.query_start_loc[-1]),
            seq_lens_B=_longer(inputs.seq_lens_B, num_requests),
            groups=tuple(
                GroupInputs(
                    block_table=_larger(group.block_table, num_requests, width),
                    slot_mapping=_longer(group.slot_mapping, num_tokens, fill=-1),
                )
                for group, width in zip(inputs.groups, self.table_widths, strict=True)
            ),
            adapter_T=None if inputs.adapter_T is None else _longer(inputs.adapter_T, num_tokens, fill=-1),
        )


def step_shapes(
    device: Capabilities, *, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int]
) -> StepShapes:
    """The shapes of a device's steps."""
    buckets = () if device.dynamic_shapes else device.token_buckets
    return StepShapes(buckets, max_num_seqs, tuple(-(-max_model_len // block_size) for block_size in block_sizes))


def padded_tokens(buckets: Sequence[int], num_tokens: int) -> int:
    """The first bucket that holds so many tokens; the number itself where there are no buckets."""
    return next((bucket for bucket in buckets if bucket >= num_tokens), num_tokens)


def _longer(x: npt.NDArray[Item], length: int, *, fill: int | np.int32 = 0) -> npt.NDArray[Item]:
    return np.concatenate([x, np.full(length - len(x), fill, dtype=x.dtype)])


def _larger(table: npt.NDArray[np.int32], rows: int, width: int) -> npt.NDArray[np.int32]:
    padded = np.zeros((rows, width), dtype=table.dtype)
    padded[: table.shape[0], : table.shape[1]] = table
    return padded
