"""How a checkpoint stores its weights, as the layers ask it while a model is built.

    Linear(parts q, k, v)  ──►  formats.linear(["…q_proj", "…k_proj", "…v_proj"])  ──►  LinearFormat
        prepare_weight(WeightSpec(…, scheme=format.scheme))  ◄──────────────────────────────┤
        weight.place(format.part(name, stored), row_offset)  ◄──────────────────────────────┤
        x.index_select(1, format.input_order), where there is one  ◄────────────────────────┘

One product has one packed weight, so its parts must be stored alike; whoever implements `WeightFormats` decides
whether unlike parts can be read as plain ones or are an error. `open_quantized` gives the formats that belong to a
checkpoint; layers only ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from octavo.core.backend.quant import QuantizedTensor, QuantScheme
from octavo.core.quant.kv_scheme import KVScheme
from octavo.core.quant.layer import dequantized


@dataclass(frozen=True, slots=True, eq=False)
class LinearFormat:
    """How the weight of one product is stored.

    Attributes:
        scheme: of every part; None: plain, or dequantised while it is read.
        input_order: [K] int64; the stored columns are those of the original weight in this order, so that x must be
            gathered by it before the product: out = x[:, input_order] @ W.T. None where the order is the original.
        part_orders: [K] int64 by the name of a part: the order in which that part is read. Where the format has no
            common order, `part` puts the columns back.
    """

    scheme: QuantScheme | None = None
    input_order: torch.Tensor | None = None
    part_orders: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def as_plain(self) -> LinearFormat:
        """The format of the same weight dequantised, its columns in the original order."""
        return replace(self, scheme=None, input_order=None)

    def part(self, name: str, stored: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
        """A part [n, K], as the checkpoint gave it, in this format: dequantised (fp32) where that is plain.

        Args:
            name: one of the names that `linear` was asked for.
            stored: what the checkpoint read, all K columns of it.
        """
        if self.scheme is not None:
            return stored
        return dequantized(stored, self.part_orders.get(name))


class WeightFormats(Protocol):
    """How each layer of a checkpoint is stored.

    Attributes:
        kv_scheme: the KV cache that the checkpoint was calibrated for; None: it says nothing of one.
    """

    kv_scheme: KVScheme | None

    def linear(self, names: Sequence[str]) -> LinearFormat:
        """The format of the weight that stacks these checkpoint layers (names without ".weight").

        Raises:
            CheckpointError: the parts are stored in ways that no one weight can hold; the message names them.
        """
        ...


class _Plain:
    """Every weight is plain."""

    kv_scheme: KVScheme | None = None

    def linear(self, names: Sequence[str]) -> LinearFormat:
        del names
        return LinearFormat()


PLAIN: WeightFormats = _Plain()
"""The formats of a checkpoint without quantised weights."""
