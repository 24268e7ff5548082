"""What a PEFT adapter_config.json says of the mathematics, read strictly.

    target_modules      ┐
    exclude_modules     ├─► selects(layer)      which layers the adapter has weights for
    layers_to_transform │
    layers_pattern      ┘                    target_parameters ──► selects_parameter(…experts.down_proj)
    r, rank_pattern ──────► rank_of(layer) ┐
    lora_alpha, alpha_pattern, use_rslora ─┴─► scale_of(layer)      alpha / r, or alpha / sqrt(r)

A field that changes what is computed is read here, or refused with what to do instead; one that only steered training
is inert. A field that this version does not know is refused unless it says nothing (null, false, empty).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from octavo.core.base.errors import CheckpointError
from octavo.core.lora.patterns import begins_with, check_pattern, is_whole

T = TypeVar("T")

CONFIG_FILE = "adapter_config.json"

MAX_ALPHA = 1e6
"""Above it logits overflow; adapters in use stay below a thousand."""

ALL_LINEAR = "all-linear"
"""target_modules: every linear layer but the output head."""

_MERGE = "merge the adapter into its model (PEFT's merge_and_unload) and serve that"

_READ = (
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "target_parameters",
)  # fmt: skip

_INERT = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
)  # fmt: skip
"""They steer training, or name things; those of an initialisation count only where init_lora_weights names it."""

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA rescales whole columns of the weights",
    "bias": 'it changes the base model\'s biases; train with bias "none", or ' + _MERGE,
    "lora_bias": "its layers add biases",
    "modules_to_save": "it replaces whole layers of the base model",
    "trainable_token_indices": "it replaces rows of the base model's embedding",
    "fan_in_fan_out": "it was made for a model that stores its weights transposed",
    "layer_replication": "it repeats layers of the base model",
    "ensure_weight_tying": "it ties the embedding's adapter to the output head's",
    "use_qalora": "QALoRA pools the inputs of its layers",
    "alora_invocation_tokens": "aLoRA begins at a token and not with the prompt",
}
"""Fields that change the mathematics in a way that is not implemented. Never written to."""

_NOTHING: tuple[Any, ...] = (None, False, "none", "", [], {})

_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base model's weights alone; others (PiSSA, OLoRA, …) move a part into A and B."""

Names = tuple[str, ...] | str
"""Names of layers or their last parts, or one regular expression."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The fields of an adapter_config.json that the mathematics depends on; see PEFT's LoraConfig."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: Names
    exclude_modules: Names
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    target_parameters: tuple[str, ...]

    @classmethod
    def read(cls, values: Mapping[str, Any], path: Path) -> LoraSettings:
        """Read adapter_config.json strictly.

        Args:
            values: its content.
            path: of the adapter, for errors.

        Raises:
            CheckpointError: a field is missing or malformed, or asks for what is not implemented.
        """
        reader = _Reader(values, path)
        reader.refuse_unsupported()
        targets, parameters = reader.names("target_modules"), reader.names("target_parameters")
        if isinstance(parameters, str):
            raise reader.error("target_parameters", f"is {parameters!r}; give a list of names")
        if not targets and not parameters:
            raise reader.error("target_modules", "is missing; an adapter must say which layers it adapts")
        layers = reader.layers_to_transform()
        if isinstance(targets, str) and layers is not None:
            raise reader.error("layers_to_transform", "can't go with a target_modules that is one text")
        return cls(
            r=reader.rank("r", values.get("r", 8)),
            lora_alpha=reader.alpha("lora_alpha", values.get("lora_alpha", 8)),
            use_rslora=reader.boolean("use_rslora"),
            rank_pattern={key: reader.rank("rank_pattern", value) for key, value in reader.pattern("rank_pattern")},
            alpha_pattern={key: reader.alpha("alpha_pattern", value) for key, value in reader.pattern("alpha_pattern")},
            target_modules=targets,
            exclude_modules=reader.names("exclude_modules"),
            layers_to_transform=layers,
            layers_pattern=reader.layers_pattern(),
            target_parameters=parameters,
        )

    @property
    def max_rank(self) -> int:
        """The largest rank that any layer can have."""
        return max(self.r, *self.rank_pattern.values(), 1)

    @property
    def is_all_linear(self) -> bool:
        """Whether target_modules stands for every linear layer."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == ALL_LINEAR

    def rank_of(self, layer: str) -> int:
        """The rank of a layer."""
        return _by_pattern(self.rank_pattern, layer, self.r)

    def scale_of(self, layer: str) -> float:
        """What multiplies B @ A of a layer. Source: Hu et al. 2021; rank-stabilised: Kalajdzievski 2023."""
        rank = self.rank_of(layer)
        alpha = _by_pattern(self.alpha_pattern, layer, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def selects(self, layer: str) -> bool:
        """Whether the adapter has weights for a layer, by PEFT's rules."""
        if self.exclude_modules and _matches(self.exclude_modules, layer):
            return False
        if self.is_all_linear:
            return True
        if not _matches(self.target_modules, layer):
            return False
        named_whole = layer in self.target_modules and not isinstance(self.target_modules, str)
        return self.layers_to_transform is None or named_whole or self._layer_index(layer) in self.layers_to_transform

    def selects_parameter(self, parameter: str) -> bool:
        """Whether the adapter has weights for a parameter that holds all experts of a layer, or for a router's."""
        return _matches(self.target_parameters, parameter)

    def _layer_index(self, layer: str) -> int | None:
        """The number of the decoder layer that a layer is part of: the first one in its name."""
        if not self.layers_pattern:
            found = begins_with(r".*?\.[^.]*\.(\d+)\.", layer)
        else:
            tries = (begins_with(rf"(?:^|.*?\.){pattern}\.(\d+)\.", layer) for pattern in self.layers_pattern)
            found = next((match for match in tries if match), None)
        return None if found is None else int(found[1])


def _matches(names: Names, layer: str) -> bool:
    if isinstance(names, str):
        return is_whole(names, layer)
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, T], layer: str, default: T) -> T:
    """The value of the first pattern that is the end of the layer's name, whole parts of it."""
    for pattern, value in patterns.items():
        if begins_with(rf"(.*\.)?({pattern})$", layer):
            return value
    return default


class _Reader:
    """Typed access to the fields, with errors that name the file."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values = values
        self._file = path / CONFIG_FILE

    def error(self, field: str, what: str) -> CheckpointError:
        """An error that names the file and the field."""
        return CheckpointError(f"{self._file}: {field} {what}", field=field)

    def refuse_unsupported(self) -> None:
        """Raise for the first field that this version does not compute as it says."""
        if (kind := self._values.get("peft_type")) != "LORA":
            raise self.error("peft_type", f"is {kind!r}; only LORA adapters can be served: {_MERGE}")
        for field, value in self._values.items():
            if field in _READ or field in _INERT or any(value is not True and value == each for each in _NOTHING):
                continue
            if field not in _REFUSED:
                raise self.error(field, f"is {value!r}, a field that this version does not know; {_MERGE}")
            why = _REFUSED[field]
            raise self.error(field, f"is {value!r}: {why if _MERGE in why else f'{why}; {_MERGE}'}")
        if (init := self._values.get("init_lora_weights", True)) not in _PLAIN_INITS:
            raise self.error(
                "init_lora_weights",
                f"is {init!r}, which changes the base model's weights too; convert the adapter to plain LoRA (PEFT's "
                f"save_pretrained with path_initial_model_for_weight_conversion), or {_MERGE}",
            )

    def rank(self, field: str, value: object) -> int:
        """A rank."""
        if type(value) is not int or value < 1:
            raise self.error(field, f"is {value!r}; a rank is a whole number of at least 1")
        return value

    def alpha(self, field: str, value: object) -> float:
        """A numerator of the scale."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_ALPHA:
            raise self.error(field, f"is {value!r}; give a number of at most {MAX_ALPHA:g}")
        return float(value)

    def boolean(self, field: str) -> bool:
        """true or false; false where it is missing."""
        value = self._values.get(field) or False
        if not isinstance(value, bool):
            raise self.error(field, f"is {value!r}; give true or false")
        return value

    def names(self, field: str) -> Names:
        """A list of names, or a text."""
        value = self._values.get(field) or ()
        if isinstance(value, str):
            if value.lower() != ALL_LINEAR:
                self._check_regex(field, value)
            return value
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise self.error(field, f"is {value!r}; give a list of names, or a regular expression")
        return tuple(value)

    def pattern(self, field: str) -> list[tuple[str, Any]]:
        """The pairs of a mapping from patterns to values, in order."""
        value = self._values.get(field) or {}
        if not isinstance(value, dict):
            raise self.error(field, f"is {value!r}; give an object of patterns and numbers")
        for key in value:
            self._check_regex(field, key)
        return list(value.items())

    def layers_to_transform(self) -> tuple[int, ...] | None:
        """Numbers of decoder layers; None: all."""
        value = self._values.get("layers_to_transform")
        several = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(index) is int and index >= 0 for index in several):
            raise self.error("layers_to_transform", f"is {value!r}; give whole numbers of layers")
        return tuple(several) or None

    def layers_pattern(self) -> tuple[str, ...]:
        """Names of lists of layers; none: any."""
        value = self._values.get("layers_pattern") or ()
        several = tuple(value) if isinstance(value, list | tuple) else (value,)
        for pattern in several:
            self._check_regex("layers_pattern", pattern)
        return several

    def _check_regex(self, field: str, text: object) -> None:
        fault = check_pattern(text) if isinstance(text, str) else "it is no text"
        if fault is not None:
            raise self.error(field, f"holds {text!r}, which is no regular expression ({fault})")
