"""Rotary positions of a GGUF file as config.json's fields.

    rope.scaling.type  linear, yarn           the same schemes at Hugging Face
    rope_factors_long, rope_factors_short     divisors of each frequency: longrope
    rope_freqs                                divisors of each frequency, for texts of any length

Llama 3's scaling is in a file as the divisors that follow from it, and not as the numbers they follow from. The scheme
longrope with both of its lists the same, and no factor on scores, is exactly that.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

from octavo.core.base.errors import CheckpointError
from octavo.core.load.gguf_file import GGUFFile
from octavo.core.load.gguf_names.architecture import Architecture

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TABLES = (FREQS, LONG, SHORT)
"""Tensors that become config fields."""


def rope_fields(
    file: GGUFFile, architecture: Architecture, own: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """`rope_scaling`, and `partial_rotary_factor` where only a part of a head is rotated.

    Args:
        own: the keys under the architecture's prefix.
        config: the fields so far, `head_dim` among them.

    Raises:
        CheckpointError: a scaling that config.json can't express.
    """
    if architecture.rotary == "none":
        return {}
    head_dim = config["head_dim"]
    rotated = own.get("rope.dimension_count", head_dim)
    fields: dict[str, Any] = {}
    if architecture.rotary == "whole" and rotated != head_dim:
        raise _refuse(file, "rope.dimension_count", f"is {rotated} where a head has {head_dim}, which is not supported")
    if architecture.rotary == "partial":
        if rotated > head_dim:
            raise _refuse(file, "rope.dimension_count", f"is {rotated} where a head has {head_dim}")
        fields["partial_rotary_factor"] = _fraction(rotated, head_dim)
    fields["rope_scaling"] = _scaling(file, architecture, own, rotated, config["max_position_embeddings"])
    return fields


def _scaling(
    file: GGUFFile, architecture: Architecture, own: Mapping[str, Any], rotated: int, max_position: int
) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    tables = [name for name in TABLES if name in file.tensors]
    if tables and kind not in ("none", "longrope"):
        raise _refuse(file, "rope.scaling.type", f"is {kind!r} beside {tables[0]}, which is not supported")
    if FREQS in tables:
        factors = _table(file, FREQS, rotated)
        # All texts are short: the two lists change places at the longest one.
        return _longrope(factors, factors, max_position, 1.0)
    if LONG in tables or SHORT in tables or kind == "longrope":
        original = own.get("rope.scaling.original_context_length")
        if original is None:
            raise _refuse(file, "rope.scaling.original_context_length", f"is missing beside {LONG}")
        factor = own.get("rope.scaling.attn_factor", own.get("rope.scaling.yarn_attn_factor", 1.0))
        return _longrope(_table(file, SHORT, rotated), _table(file, LONG, rotated), original, factor)
    if kind == "none":
        return None
    factor = own.get("rope.scaling.factor", 1.0)
    if kind == "linear" and factor > 0:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor > 0:
        return _yarn(file, architecture, own, factor)
    raise _refuse(file, "rope.scaling.type", f"is {kind!r}, by {factor!r}; linear, yarn and longrope can be read")


def _longrope(short: list[float], long: list[float], original: int, attention_factor: float) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def _yarn(file: GGUFFile, architecture: Architecture, own: Mapping[str, Any], factor: float) -> dict[str, Any]:
    if own.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        mix = own["rope.scaling.yarn_ext_factor"]
        raise _refuse(file, "rope.scaling.yarn_ext_factor", f"is {mix}; only 1.0 is supported")
    fields: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for key, name in (
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        if (value := own.get(f"rope.scaling.{key}")) is not None:
            fields[name] = value
    factors = [own.get(f"rope.scaling.{key}", 1.0) for key in ("attn_factor", "yarn_attn_factor")]
    if (times := math.prod(factors)) != 1.0:
        # The file's factor comes on top of the one that follows from the stretch; config.json's replaces it.
        fields["attention_factor"] = times * (1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0)
    return {**fields, **architecture.yarn}


def _table(file: GGUFFile, name: str, rotated: int) -> list[float]:
    """A tensor of divisors, one for each pair of rotated elements."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise _refuse(file, name, "is missing; the file is incomplete")
    if tensor.shape != (rotated // 2,) or tensor.type.name != "F32":
        found = f"{tensor.type.name} of shape {list(tensor.shape)}"
        raise _refuse(file, name, f"is {found}, not {rotated // 2} numbers in F32; the file is damaged")
    values = struct.unpack_from(f"<{rotated // 2}f", file.data, tensor.start)
    if not all(0 < value < math.inf for value in values):
        raise _refuse(file, name, "holds what is no divisor; the file is damaged")
    return list(values)


def _fraction(rotated: int, head_dim: int) -> float:
    """rotated / head_dim, such that the product with head_dim is at least `rotated` before it is cut."""
    fraction = rotated / head_dim
    return fraction if int(head_dim * fraction) == rotated else math.nextafter(fraction, 2.0)


def _refuse(file: GGUFFile, name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: {name} {what}", field=name)
