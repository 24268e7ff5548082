"""Rotary position tables.

    cos_sin [P, R] fp32:   row p = [cos(p f0) .. cos(p f_{R/2-1}) | sin(p f0) .. sin(p f_{R/2-1})] * attention factor

A table is computed once, in fp32 from first to last as the checkpoints' reference does, so that far positions get the
angles the model was trained with; layers with equal parameters share one table.

Where frequencies depend on a request's length (`switch_tokens` S), a table holds both kinds of rows:

    rows 0 .. S-1                     positions of requests of at most S tokens, with the short frequencies
    rows S .. S + max_model_len - 1   positions 0 .. of longer requests, with the long frequencies

A request uses one part all its life (`rotary_offset` says which), so no cache ever mixes the two; the engine adds the
offset to the positions of a step and names cached blocks by it. See docs/decisions/0013-length-dependent-positions.md.

P letters rows, R the rotated elements of a head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.layers.context import LayerContext
from octavo.core.layers.rope_scaling import RopeScaling, plain_frequencies


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Everything that decides a table's values.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: R, elements of a head that are rotated.
        scaling: how the frequencies are changed for longer contexts; None leaves them.
    """

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None

    @property
    def switch_tokens(self) -> int | None:
        """Requests of more tokens than this have other frequencies; None: all have the same."""
        return None if self.scaling is None else self.scaling.switch_tokens

    def cos_sin(self, num_positions: int, num_tokens: int) -> torch.Tensor:
        """cos_sin [num_positions, R] fp32 on the host, for requests of up to `num_tokens` tokens."""
        if self.scaling is None:
            frequencies, factor = plain_frequencies(self.theta, self.rotary_dim), 1.0
        else:
            frequencies = self.scaling.frequencies(self.theta, self.rotary_dim, num_tokens)
            factor = self.scaling.attention_factor
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
        return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


class RotaryTables:
    """The tables of one model, one per distinct set of parameters.

    Args:
        context: the model's.
        switch_tokens: of the model (`model_switch_tokens`); every table is laid out by it, since all layers see the
            same positions.
    """

    def __init__(self, context: LayerContext, switch_tokens: int | None = None) -> None:
        self._context = context
        self._switch_tokens = switch_tokens
        self._tables: dict[RopeParameters, torch.Tensor] = {}

    def get(self, parameters: RopeParameters) -> torch.Tensor:
        """cos_sin [P, rotary_dim] fp32 on the device; computed when first asked for."""
        table = self._tables.get(parameters)
        if table is None:
            table = cos_sin_table(parameters, self._context.max_model_len, self._switch_tokens)
            table = self._tables[parameters] = self._context.backend.from_host(table)
        return table


def cos_sin_table(parameters: RopeParameters, max_model_len: int, switch_tokens: int | None) -> torch.Tensor:
    """A whole table on the host, fp32; see the layout above. Without requests longer than the switch, one part."""
    if switch_tokens is None or max_model_len <= switch_tokens:
        return parameters.cos_sin(max_model_len, max_model_len)
    short = parameters.cos_sin(switch_tokens, switch_tokens)
    return torch.cat((short, parameters.cos_sin(max_model_len, max_model_len)))


def model_switch_tokens(layers: Iterable[RopeParameters | None]) -> int | None:
    """The one switch of a model's layers (None for a layer without positions); None where no layer has any.

    Raises:
        CheckpointError: layers switch at different lengths, which one offset per request can't express.
    """
    switches = {rope.switch_tokens for rope in layers if rope is not None and rope.switch_tokens is not None}
    if len(switches) > 1:
        raise CheckpointError(
            f"config.json: layers change their rotary frequencies at different lengths, {sorted(switches)}; give "
            "them one",
            field="rope_parameters",
        )
    return switches.pop() if switches else None
