"""The `quantization_config` of compressed-tensors: which group a layer belongs to, and that group's numbers.

A group's targets are names of layers, "re:" patterns, or classes such as "Linear". A layer belongs to the group that
names it, else to the first whose pattern matches the beginning of its name, else to the first with a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.base.errors import CheckpointError
from octavo.core.quant.fp8 import read_block_shape
from octavo.core.quant.settings import Settings

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
STRATEGIES = ("tensor", "channel", "group", "block", "token")

_INERT = {
    "quant_method": "chose this reader",
    "quantization_status": "a stage of the writer",
    "global_compression_ratio": "a note",
    "kv_cache_scheme": "of no weight; kv_scheme.py reads it",
    "version": "provenance",
}
_INERT_NUMBERS = {
    "observer": "how scales were found",
    "observer_kwargs": "how scales were found",
    "actorder": "shows in weight_g_idx",
    "scale_dtype": "shows in the files",
    "zp_dtype": "shows in the files",
}


@dataclass(frozen=True, slots=True)
class Group:
    """The numbers of one group of layers.

    Attributes:
        targets: what it applies to.
        format: how its weights are packed; None: as the whole checkpoint's files show.
        bits, is_float, symmetric: of the codes.
        strategy: what shares a scale.
        group_size: columns that share one, of strategy "group".
        blocks: rows and columns of a block, of strategy "block".
        activation: the format to which activations are quantised; None: they are not.
        activation_group_size: 0 per token.
    """

    targets: tuple[str, ...]
    format: str | None
    bits: int
    is_float: bool
    symmetric: bool
    strategy: str
    group_size: int
    blocks: tuple[int, int]
    activation: QuantFormat | None
    activation_group_size: int

    @property
    def kind(self) -> str:
        """For people."""
        return f"compressed-tensors {'float' if self.is_float else 'int'}{self.bits}"

    @property
    def scheme(self) -> QuantScheme:
        """Of the group's weights."""
        held = QuantFormat.INT4 if self.bits <= 4 else QuantFormat.INT8
        sizes = {"tensor": (1, -1), "channel": (1, 0), "group": (1, self.group_size), "block": self.blocks}
        block_rows, group_size = sizes[self.strategy]
        return QuantScheme(
            QuantFormat.FP8_E4M3FN if self.is_float else held,
            group_size,
            self.symmetric,
            self.activation,
            block_rows,
            self.activation_group_size,
        )


class Groups:
    """All groups of a checkpoint, and the layers that belong to none.

    Args:
        groups: in the config's order.
        ignore: names, patterns and classes.
    """

    def __init__(self, groups: tuple[Group, ...], ignore: tuple[str, ...]) -> None:
        self._groups = groups
        self._ignore = ignore

    def of_layer(self, name: str) -> Group:
        """The group of a layer that the files hold quantised.

        Raises:
            CheckpointError: the config ignores the layer, or has no group for it.
        """
        if _names(self._ignore, name) or _matches(self._ignore, name):
            raise CheckpointError(
                f"config.json: quantization_config.ignore lists {name}, but the files hold it quantised; the config "
                "belongs to other files",
                field="ignore",
            )
        for belongs in (_names, _matches, _has_class):
            for group in self._groups:
                if belongs(group.targets, name):
                    return group
        raise CheckpointError(
            f"config.json: quantization_config.config_groups has no group for {name}, which the files hold quantised",
            field="config_groups",
        )


def read_groups(config: Mapping[str, Any]) -> Groups:
    """The groups of a `quantization_config`.

    Raises:
        CheckpointError: it asks for what is not implemented.
    """
    settings = Settings(config)
    common = settings.choice("format", FORMATS, "dense")
    _refuse_sparsity(settings)
    if settings.section("transform_config") is not None:
        raise settings.refuse("transform_config", "transformed weights are not implemented")
    groups = tuple(_read_group(section, common) for section in settings.sections("config_groups").values())
    ignore = settings.strings("ignore")
    settings.finish(_INERT)
    return Groups(groups, ignore)


def _refuse_sparsity(settings: Settings) -> None:
    section = settings.section("sparsity_config")
    if section is not None:
        section.choice("format", ("dense",), "dense")


def _read_group(settings: Settings, common: str) -> Group:
    own = settings.choice("format", FORMATS, common)
    weights = settings.section("weights")
    if weights is None:
        raise settings.refuse("weights", "give the numbers of the group's weights")
    if settings.section("output_activations") is not None:
        raise settings.refuse("output_activations", "quantised outputs are not implemented")
    strategy, is_float, bits = _read_numbers(weights)
    blocks = read_block_shape(weights, "block_structure")
    group_size = weights.integer("group_size", 0, low=-1)
    if strategy == "group" and group_size < 1:
        raise weights.refuse("group_size", "strategy group needs a positive one")
    if strategy == "block" and blocks is None:
        raise weights.refuse("block_structure", "strategy block needs one")
    activation, activation_group_size = _read_activations(settings.section("input_activations"), blocks)
    targets = settings.strings("targets")
    symmetric = weights.flag("symmetric", True)
    weights.flag("dynamic", False)
    weights.finish(_INERT_NUMBERS)
    settings.finish()
    return Group(
        targets, None if own in ("mixed-precision", "dense") else own, bits, is_float, symmetric, strategy, group_size,
        blocks or (1, 1), activation, activation_group_size,
    )  # fmt: skip


def _read_numbers(settings: Settings) -> tuple[str, bool, int]:
    """Strategy, whether codes are floats, and their bits."""
    is_float = settings.choice("type", ("int", "float"), "int") == "float"
    bits = settings.integer("num_bits", 8)
    if bits > 8 or (is_float and bits != 8):
        raise settings.refuse("num_bits", "integers of 1 to 8 bits and floats of 8 can be loaded")
    default = "group" if settings.has("group_size") and settings.any_of("group_size") != -1 else "tensor"
    if settings.has("group_size") and settings.any_of("group_size") == -1:
        default = "channel"
    return settings.choice("strategy", STRATEGIES[:4], default), is_float, bits


def _read_activations(settings: Settings | None, blocks: tuple[int, int] | None) -> tuple[QuantFormat | None, int]:
    """To which format activations are quantised, and in which groups."""
    if settings is None:
        return None, 0
    strategy = settings.choice("strategy", STRATEGIES, "tensor")
    is_float = settings.choice("type", ("int", "float"), "int") == "float"
    if settings.integer("num_bits", 8) != 8:
        raise settings.refuse("num_bits", "activations of 8 bits can be run")
    group_size = settings.integer("group_size", blocks[1] if blocks and strategy == "block" else 0, low=-1)
    symmetric = settings.flag("symmetric", True)
    settings.any_of("dynamic")
    settings.finish({**_INERT_NUMBERS, "block_structure": "of weights"})
    if not symmetric:
        return None, 0
    grouped = strategy in ("group", "block") and group_size > 0
    return (QuantFormat.FP8_E4M3FN if is_float else QuantFormat.INT8), group_size if grouped else 0


def _names(targets: Iterable[str], name: str) -> bool:
    return name in targets


def _matches(targets: Iterable[str], name: str) -> bool:
    try:
        return any(re.match(target[3:], name) for target in targets if target.startswith("re:"))
    except re.error as error:
        raise CheckpointError(f"config.json: quantization_config names no pattern: {error}", field="targets") from error


def _has_class(targets: Iterable[str], name: str) -> bool:
    """Whether a target is a class; the files don't tell a layer's, but all that hold codes are linear."""
    del name
    return any(not target.startswith("re:") and "." not in target and target[:1].isupper() for target in targets)
