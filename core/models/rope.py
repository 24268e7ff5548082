"""Rotary parameters in a config.json, in the forms that checkpoints use.

{"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8}}                the older form
{"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8}}             the newer one
{"rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}}               the newer one, by kind of layer

`original_max_position_embeddings` and `partial_rotary_factor` stand inside the object or beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from octavo.core.layers.rope import RopeParameters, model_switch_tokens
from octavo.core.models.config import ConfigReader
from octavo.core.models.rope_schemes import NEUTRAL, RopeFacts, read_scaling, rope_type

__all__ = ["derived_max_position", "model_switch_tokens", "read_layer_ropes", "read_rope", "rope_parameters"]

PARTIAL = "partial_rotary_factor"


def read_rope(
    reader: ConfigReader,
    rotary_dim: int,
    *,
    default_theta: float,
    default_fraction: float | None = None,
    schemes: Collection[str] | None = None,
) -> RopeParameters:
    """The rotary parameters of a model whose layers all have the same.

    Args:
        reader: of config.json.
        rotary_dim: rotated elements of a head; with `default_fraction`, all elements of a head.
        default_theta: the base where the config names none.
        default_fraction: for families that rotate a part of the head: which part, where the config doesn't say
            (`partial_rotary_factor`). None: the family rotates whole heads, and another fraction is refused.
        schemes: scalings that the family's own class knows besides none; None: all.

    Raises:
        CheckpointError: a scaling that is not implemented, or a field of one that is missing or unknown.
    """
    theta = reader.number("rope_theta", default_theta)
    scaling = reader.section("rope_scaling")
    parameters = reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
    section = parameters or scaling
    if section is not None and schemes is not None and rope_type(section) not in ("default", *schemes):
        raise section.refuse("rope_type", f"the family knows {', '.join(schemes)} alone")
    return rope_parameters(
        section,
        rotary_dim,
        theta=theta,
        max_position=reader.integer("max_position_embeddings"),
        original_max_position=_original_beside(reader),
        fraction=None if default_fraction is None else reader.number(PARTIAL, default_fraction),
    )


def read_layer_ropes(
    reader: ConfigReader, rotary_dim: int, thetas: Mapping[str, float], *, own_base: Mapping[str, str]
) -> dict[str, RopeParameters]:
    """The rotary parameters of a model whose kinds of layers differ.

    Args:
        reader: of config.json.
        rotary_dim: rotated elements of a head.
        thetas: each kind's name, as in `layer_types`, with its base where the config names none.
        own_base: in the older form, the field that holds a kind's own base; such a kind is never scaled there. Other
            kinds have `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: see `read_rope`.
    """
    bases = {
        kind: reader.number(own_base.get(kind, "rope_theta"), default_theta) for kind, default_theta in thetas.items()
    }
    nested = reader.section("rope_parameters")
    if nested is not None and reader.has("rope_scaling"):
        raise reader.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
    max_position = reader.integer("max_position_embeddings")
    ropes = {}
    for kind, theta in bases.items():
        section = nested.section(kind) if nested is not None else None
        original = None
        if nested is None and kind not in own_base:
            section, original = reader.section("rope_scaling"), _original_beside(reader)
        ropes[kind] = rope_parameters(
            section, rotary_dim, theta=theta, max_position=max_position, original_max_position=original
        )
    if nested is not None:
        nested.finish()
    return ropes


def rope_parameters(
    section: ConfigReader | None,
    rotary_dim: int,
    *,
    theta: float,
    max_position: int | None = None,
    original_max_position: int | None = None,
    fraction: float | None = None,
) -> RopeParameters:
    """The parameters of one `rope_parameters` or `rope_scaling` object; None leaves positions unscaled.

    Args:
        section: the object.
        rotary_dim: rotated elements of a head; with `fraction`, all elements of a head.
        theta: the base where the object names none.
        max_position, original_max_position: as the config states them beside the object.
        fraction: of the head that is rotated, where the object doesn't say; None: whole heads, and nothing else.

    Raises:
        CheckpointError: see `read_rope`.
    """
    if section is None:
        return RopeParameters(theta, _rotated(None, rotary_dim, 1.0 if fraction is None else fraction))
    theta = section.number("rope_theta", theta)
    is_proportional = rope_type(section) == "proportional"
    part = 1.0
    if fraction is not None or is_proportional:
        part = section.number(PARTIAL, 1.0 if fraction is None else fraction)
    # A proportional table covers the whole head: what is not rotated has frequency 0.
    rotated = rotary_dim if is_proportional else _rotated(section, rotary_dim, part)
    facts = RopeFacts(theta, rotated, part, max_position, original_max_position)
    scaling = read_scaling(section, facts)
    section.finish(neutral=NEUTRAL if fraction is not None else {**NEUTRAL, PARTIAL: 1.0})
    return RopeParameters(theta, rotated, scaling)


def derived_max_position(stated: int, layers: Iterable[RopeParameters | None], *, is_scaled: bool = False) -> int:
    """Positions a model reads, in tokens: the upper limit of max_model_len. Derived here and nowhere else.

    Some schemes' configs state the length after scaling (llama3, longrope), some the one before (linear, dynamic), and
    yarn's either; so yarn's is always the original length times the factor. Only the shortest of scaled layers counts:
    an unscaled layer beside a scaled one has a window.

    Args:
        stated: `max_position_embeddings`.
        layers: of each layer, or each kind of layer; None has no positions.
        is_scaled: the family states the length after scaling, whatever the scheme (Gemma 3).
    """
    scalings = [rope.scaling for rope in layers if rope is not None and rope.scaling is not None]
    if is_scaled or not scalings:
        return stated
    return min(scaling.max_position(stated) for scaling in scalings)


def _original_beside(reader: ConfigReader) -> int | None:
    """`original_max_position_embeddings` beside the object; schemes that don't use it make it meaningless."""
    reader.skip("original_max_position_embeddings")
    if not reader.has("original_max_position_embeddings"):
        return None
    return reader.integer("original_max_position_embeddings")


def _rotated(section: ConfigReader | None, head_dim: int, fraction: float) -> int:
    """Elements of a head that are rotated."""
    rotated = int(head_dim * fraction)
    if rotated % 2 or not 0 < rotated <= head_dim:
        source = section or ConfigReader({PARTIAL: fraction})
        raise source.refuse(PARTIAL, f"it must rotate an even number of a head's {head_dim} elements, not {rotated}")
    return rotated
