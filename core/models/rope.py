"""Rotary parameters in a config.json, in the two forms that checkpoints use.

{"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8}}                the older form
{"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8}}             the newer one
"""

from __future__ import annotations

from octavo.core.layers.rope import LinearScaling, Llama3Scaling, RopeParameters
from octavo.core.models.config import ConfigReader

_NEUTRAL = {"partial_rotary_factor": 1.0}


def read_rope(reader: ConfigReader, rotary_dim: int, *, default_theta: float) -> RopeParameters:
    """The rotary parameters of a model whose layers all have the same.

    Raises:
        CheckpointError: a scaling that is not implemented, or a field of one that is missing or unknown.
    """
    theta = reader.number("rope_theta", default_theta)
    scaling = reader.section("rope_scaling")
    parameters = reader.section("rope_parameters")
    if scaling is not None and parameters is not None:
        raise reader.refuse("rope_scaling", "rope_parameters is given as well; keep one of them")
    return rope_parameters(parameters or scaling, rotary_dim, theta=theta)


def rope_parameters(section: ConfigReader | None, rotary_dim: int, *, theta: float) -> RopeParameters:
    """The parameters of one `rope_parameters` or `rope_scaling` object; None leaves positions unscaled.

    Args:
        theta: the base where the object names none.

    Raises:
        CheckpointError: see `read_rope`.
    """
    if section is None:
        return RopeParameters(theta, rotary_dim)
    theta = section.number("rope_theta", theta)
    scaling = _scaling(section)
    section.finish(neutral=_NEUTRAL)
    return RopeParameters(theta, rotary_dim, scaling)


def _scaling(section: ConfigReader) -> LinearScaling | Llama3Scaling | None:
    known = {name: name for name in ("default", "linear", "llama3")}
    older_name = section.choice("type", known, "default")
    kind = section.choice("rope_type", known, older_name)
    if kind == "default":
        return None
    factor = section.number("factor")
    if kind == "linear":
        return LinearScaling(factor)
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if high <= low:
        raise section.refuse("high_freq_factor", f"it must be above low_freq_factor, {low}")
    return Llama3Scaling(factor, low, high, section.integer("original_max_position_embeddings"))
