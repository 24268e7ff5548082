"""From one `rope_scaling` or `rope_parameters` object to a scheme.

Every field is read by the scheme that uses it; `finish()` of the object's reader then refuses what is left, so a field
of another scheme is never passed over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octavo.core.layers.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    YarnScaling,
    yarn_temperature,
)
from octavo.core.models.config import ConfigReader

NEUTRAL: Mapping[str, object] = {"finetuned": True}
"""Fields of a scheme's object that change nothing while they hold this value. Never written to."""


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What a scheme needs to know of the rest of the config.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: rotated elements of a head.
        fraction: what part of the head they are.
        max_position: `max_position_embeddings`; None where the caller doesn't say.
        original_max_position: `original_max_position_embeddings` beside the object, which outranks the one inside.
    """

    theta: float
    rotary_dim: int
    fraction: float = 1.0
    max_position: int | None = None
    original_max_position: int | None = None


def rope_type(section: ConfigReader) -> str:
    """The scheme's name, from either spelling of the field, as one of SCHEMES or "default"."""
    known = {"default": "default", "su": "longrope"} | {name: name for name in SCHEMES}
    older_name = section.choice("type", known, "default")
    kind: str = section.choice("rope_type", known, older_name)
    # Early long Phi-3 files call their scheme yarn; only longrope has two lists of divisors.
    return "longrope" if kind == "yarn" and section.has("short_factor") else kind


def read_scaling(section: ConfigReader, facts: RopeFacts) -> RopeScaling | None:
    """The scheme of an object, or None where it names the default.

    Raises:
        CheckpointError: a scheme that is not implemented, or a field that is missing or out of range.
    """
    kind = rope_type(section)
    return None if kind == "default" else SCHEMES[kind](section, facts)


def _linear(section: ConfigReader, _facts: RopeFacts) -> RopeScaling:
    return LinearScaling(section.number("factor"))


def _dynamic(section: ConfigReader, facts: RopeFacts) -> RopeScaling:
    if facts.rotary_dim <= 2:
        raise section.refuse("rope_type", "dynamic scaling needs more than two rotated elements of a head")
    if facts.max_position is None:
        raise section.refuse("rope_type", "dynamic scaling needs max_position_embeddings")
    return DynamicScaling(section.number("factor"), facts.max_position)


def _llama3(section: ConfigReader, facts: RopeFacts) -> RopeScaling:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.refuse("high_freq_factor", f"it must be above low_freq_factor, {low}")
    return Llama3Scaling(section.number("factor"), low, high, _original(section, facts))


def _yarn(section: ConfigReader, facts: RopeFacts) -> RopeScaling:
    if facts.theta <= 1:
        raise section.refuse("rope_theta", "yarn needs a base above 1")
    original = _original(section, facts, default=facts.max_position)
    ratio = _ratio(facts, original)
    factor = section.number("factor", None if ratio == 1 else ratio)
    fast, slow = section.number("beta_fast", 32.0), section.number("beta_slow", 1.0)
    if fast < slow:
        raise section.refuse("beta_fast", f"it must not be below beta_slow, {slow}")
    mscale = section.optional_number("mscale", zero_is_absent=True)
    mscale_all_dim = section.optional_number("mscale_all_dim", zero_is_absent=True)
    temperature = yarn_temperature(factor)
    if mscale and mscale_all_dim:
        temperature = yarn_temperature(factor, mscale) / yarn_temperature(factor, mscale_all_dim)
    return YarnScaling(
        factor,
        original,
        attention_factor=section.number("attention_factor", temperature),
        beta_fast=fast,
        beta_slow=slow,
        truncate=section.boolean("truncate", True),
        mscale_all_dim=mscale_all_dim or 0.0,
    )


def _longrope(section: ConfigReader, facts: RopeFacts) -> RopeScaling:
    original = _original(section, facts)
    if original < 2:
        raise section.refuse("original_max_position_embeddings", "longrope needs at least 2")
    factor = section.number("factor", _ratio(facts, original))
    stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        section.numbers("short_factor", facts.rotary_dim // 2),
        section.numbers("long_factor", facts.rotary_dim // 2),
        original,
        attention_factor=section.number("attention_factor", stretch),
    )


def _proportional(section: ConfigReader, facts: RopeFacts) -> RopeScaling:
    return ProportionalScaling(facts.fraction, section.number("factor", 1.0))


def _original(section: ConfigReader, facts: RopeFacts, *, default: int | None = None) -> int:
    """The length of the first training; one beside the object outranks the one inside, as in the reference."""
    if facts.original_max_position is None:
        return section.integer("original_max_position_embeddings", default)
    section.skip("original_max_position_embeddings")
    return facts.original_max_position


def _ratio(facts: RopeFacts, original: int) -> float | None:
    """The stretch where an object names none: the ratio of the two lengths, if both are known."""
    return None if facts.max_position is None else facts.max_position / original


SCHEMES: Mapping[str, Callable[[ConfigReader, RopeFacts], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""Name in a config to the reader of its fields. Never written to."""
