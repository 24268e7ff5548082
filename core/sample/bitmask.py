"""Masks of grammars: one bit a token, the lowest id in the lowest bit of the first byte."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch


def apply_masks(logits_RV: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    """Set the logits of tokens that a row's mask does not name to -inf, in place.

    A mask may be longer or shorter than the row: a tokenizer may know more ids than the model has logits, or fewer.

    Shapes: logits [R, V] float32; masks by row, all of one length.
    """
    width = logits_RV.shape[1]
    bytes_MB = np.frombuffer(b"".join(masks.values()), dtype=np.uint8).reshape(len(masks), -1)
    bits_MV = np.unpackbits(bytes_MB, axis=1, bitorder="little")[:, :width]
    denied_MV = np.ones((len(masks), width), dtype=bool)
    denied_MV[:, : bits_MV.shape[1]] = bits_MV == 0
    denied = torch.from_numpy(denied_MV).to(logits_RV.device)
    for denied_V, row in zip(denied, masks, strict=True):
        logits_RV[row].masked_fill_(denied_V, -torch.inf)


def allows_others(mask: bytes, ids: npt.NDArray[np.int64]) -> bool:
    """Whether a mask allows any token besides these.

    Shapes: ids [I], none twice.
    """
    bits_V = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
    known = ids[ids < len(bits_V)]
    return int(bits_V.sum()) > int(bits_V[known].sum())
