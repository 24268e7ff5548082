"""How a checkpoint stores its weights, as the layers ask it while a model is built.

    Linear(parts q, k, v)  ──►  formats.linear(["…q_proj", "…k_proj", "…v_proj"])  ──►  LinearFormat(scheme, input_order)
                                                                                              │
                                      prepare_weight(WeightSpec(…, scheme=scheme))  ◄─────────┘

One product has one packed weight, so its parts must be stored alike; whoever implements `WeightFormats` decides
whether unlike parts can be read as plain ones or are an error. `open_quantized` gives the formats that belong to a
checkpoint; layers only ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from octavo.core.backend.quant import QuantScheme


@dataclass(frozen=True, slots=True, eq=False)
class LinearFormat:
    """How the weight of one product is stored.

    Attributes:
        scheme: of every part; None: plain, or dequantised while it is read.
        input_order: [K] int64; the stored columns are those of the original weight in this order, so that x must be
            gathered by it before the product: out = x[:, input_order] @ W.T. None where the order is the original.
    """

    scheme: QuantScheme | None = None
    input_order: torch.Tensor | None = None


class WeightFormats(Protocol):
    """How each layer of a checkpoint is stored."""

    def linear(self, names: Sequence[str]) -> LinearFormat:
        """The format of the weight that stacks these checkpoint layers (names without ".weight").

        Raises:
            CheckpointError: the parts are stored in ways that no one weight can hold; the message names them.
        """
        ...


class _Plain:
    """Every weight is plain."""

    def linear(self, names: Sequence[str]) -> LinearFormat:
        del names
        return LinearFormat()


PLAIN: WeightFormats = _Plain()
"""The formats of a checkpoint without quantised weights."""
