"""Strict reading of a checkpoint's config.json.

    fields the family implements  -> read, with type and range checked
    fields known to change nothing -> INERT, plus the family's own, each with its reason
    any other field                -> refused, unless it says "not used" (null, false, empty) or holds the one value
                                      the family names as neutral

So a checkpoint that needs mathematics we don't have fails at the door instead of giving subtly wrong text. One
`ConfigReader` reads one dict; it remembers what was asked for, and `finish()` judges the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from octavo.core.base.errors import CheckpointError

INERT: Mapping[str, str] = {
    # Names and provenance.
    "architectures": "chose the family",
    "model_type": "chose the family",
    "_name_or_path": "provenance",
    "_commit_hash": "provenance",
    "transformers_version": "provenance",
    "transformers.js_config": "settings of another runtime",
    "tokenizer_class": "read by the tokenizer",
    "is_llama_config": "a note",
    "unsloth_fixed": "a note",
    "unsloth_version": "provenance",
    # How the weights were trained or are stored.
    "initializer_range": "training only",
    "attention_dropout": "training only",
    "hidden_dropout": "training only",
    "pretraining_tp": "how training was sharded; no reader uses it any more",
    "torch_dtype": "storage; read where dtype is chosen",
    "dtype": "storage; read where dtype is chosen",
    "chunk_size_feed_forward": "memory of another runtime",
    # How another runtime runs it.
    "use_cache": "another runtime's cache",
    "return_dict": "another runtime's output",
    "output_hidden_states": "another runtime's output",
    "output_attentions": "another runtime's output",
    "_attn_implementation_autoset": "another runtime's kernels",
    "_attn_implementation": "another runtime's kernels",
    "attn_implementation": "another runtime's kernels",
    "cache_implementation": "another runtime's cache",
    "use_return_dict": "another runtime's output",
    # Text and sampling: read by the tokenizer and the engine.
    "bos_token_id": "read by the engine",
    "eos_token_id": "read by the engine",
    "pad_token_id": "no padding in a ragged batch",
    "unk_token_id": "read by the tokenizer",
    "max_length": "a generation default",
    "max_sequence_length": "a generation default; max_position_embeddings is the limit",
    "do_sample": "a generation default",
    "temperature": "a generation default",
    "top_k": "a generation default",
    "top_p": "a generation default",
    "num_beams": "a generation default",
    "repetition_penalty": "a generation default",
    "id2label": "read by the pooler",
    "label2id": "of classifiers",
    "problem_type": "read by the pooler",
    "num_labels": "read by the pooler",
    "finetuning_task": "a note",
    "sentence_transformers": "read by the pooler",
    "sbert_ce_default_activation_function": "read by the pooler",
    "matryoshka_dimensions": "read by the pooler",
    "is_matryoshka": "a note",
    "embedding_pooling": "read by the pooler",
}
"""Fields that every family may pass over, with the reason. Never written to."""

MAX_SIZE = (1 << 31) - 1
MAX_LAYERS = 1 << 13
MAX_NUMBER = 1e15
"""Bounds of what is read before the files are compared with it: lists of so many layers are made meanwhile, and what is
computed of numbers stays finite."""


class ConfigReader:
    """Reads the fields of one config, or of one object inside it.

    Args:
        values: the JSON object.
        where: prefix of field names in messages, such as "rope_scaling.".
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where
        self._seen: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there and not null. This alone does not count as reading it."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer from 1 to `MAX_SIZE`; `default` where absent or null, and required without one."""
        value = self._take(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, value, "an integer of at least 1")
        if value > MAX_SIZE:
            raise self._wrong(name, value, f"an integer of at most {MAX_SIZE}")
        return value

    def layers(self, name: str) -> int:
        """How many layers a model has: an integer from 1 to `MAX_LAYERS`; required."""
        value = self.integer(name)
        if value > MAX_LAYERS:
            raise self._wrong(name, value, f"an integer of at most {MAX_LAYERS}")
        return value

    def optional_integer(self, name: str) -> int | None:
        """An integer of at least 1; None where absent or null."""
        self._seen.add(name)
        return self.integer(name) if self.has(name) else None

    def count(self, name: str, default: int) -> int:
        """An integer of at least 0; `default` where absent or null."""
        value = self._take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(name, value, "an integer of at least 0")
        return value

    def integers(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """A list of integers of at least 0, perhaps empty; `default` where absent or null."""
        self._seen.add(name)
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
            raise self._wrong(name, value, "a list of integers of at least 0")
        return tuple(value)

    def expect(self, name: str, value: int) -> None:
        """Refuse the field unless it is absent, null, or repeats what other fields say."""
        self._seen.add(name)
        if self.has(name) and self._values[name] != value:
            raise self._wrong(name, self._values[name], f"{value}, as other fields say")

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; `default` where absent or null, and required without one."""
        value = self._take(name, default)
        if not _is_positive(value):
            raise self._wrong(name, value, f"a number above 0, at most {MAX_NUMBER:g}")
        return float(value)

    def optional_number(self, name: str, default: float | None = None, *, zero_is_absent: bool = False) -> float | None:
        """A finite number above 0; `default` where absent; None where null, or 0 where that says the same."""
        self._seen.add(name)
        if name not in self._values:
            return default
        if zero_is_absent and self._values.get(name) in (0, None):
            return None
        return self.number(name) if self.has(name) else None

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` finite numbers above 0, which must be there."""
        value = self._take(name, None)
        if not isinstance(value, list) or len(value) != length or not all(_is_positive(item) for item in value):
            raise self._wrong(name, value, f"a list of {length} finite numbers above 0")
        return tuple(float(item) for item in value)

    def boolean(self, name: str, default: bool) -> bool:
        """true or false; `default` where absent or null."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def choice(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """What `known` holds for the field's value, which must be one of its keys."""
        value = self._take(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._wrong(name, value, f"one of {', '.join(known)}")
        return known[value]

    def choices(self, name: str, known: Collection[str], length: int) -> tuple[str, ...] | None:
        """A list of `length` strings, each one of `known`; None where absent or null."""
        self._seen.add(name)
        if not self.has(name):
            return None
        value = self._values[name]
        if not isinstance(value, list) or len(value) != length or any(item not in known for item in value):
            raise self._wrong(name, value, f"a list of {length} of {', '.join(known)}")
        return tuple(value)

    def section(self, name: str) -> ConfigReader | None:
        """A reader of an object inside this one; None where absent, null or empty."""
        self._seen.add(name)
        if not self.has(name):
            return None
        value = self._values[name]
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return ConfigReader(value, f"{self._where}{name}.") if value else None

    def skip(self, name: str) -> None:
        """Count a field as read that other fields make meaningless."""
        self._seen.add(name)

    def refuse(self, name: str, reason: str) -> CheckpointError:
        """An error about a field that was read and can't be used."""
        return CheckpointError(f"config.json: {self._where}{name} is {self._values.get(name)!r}; {reason}", field=name)

    def finish(self, *, inert: Collection[str] = (), neutral: Mapping[str, Any] | None = None) -> None:
        """Judge every field that was not read.

        Args:
            inert: fields of this family that change nothing.
            neutral: fields that change nothing as long as they hold this value.

        Raises:
            CheckpointError: naming the first field that may change the mathematics.
        """
        for name, value in self._values.items():
            if name in self._seen or name in inert or (not self._where and name in INERT):
                continue
            if value is None or value is False or (isinstance(value, dict | list | str) and not value):
                continue
            if neutral is not None and name in neutral and value == neutral[name]:
                continue
            raise self.refuse(name, "this field may change the mathematics and is not implemented for the family")

    def _take(self, name: str, default: Any) -> Any:
        self._seen.add(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"config.json: {self._where}{name} is missing; the config is incomplete", field=name)
        return default

    def _wrong(self, name: str, value: Any, wanted: str) -> CheckpointError:
        shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:57]}..."
        return CheckpointError(f"config.json: {self._where}{name} is {shown}; it must be {wanted}", field=name)


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= MAX_NUMBER
