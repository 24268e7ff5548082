"""Which layers have a window, as GGUF files say it; most leave it to a period that their architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.load.gguf_names.architecture import Facts


def window_fields(facts: Facts, period: int) -> Mapping[str, Any]:
    """`sliding_window` and `layer_types`: all but every n-th layer have a window, or those that the file lists.

    Args:
        period: n, where the file doesn't say.

    Raises:
        CheckpointError: a list of another length than there are layers.
    """
    num_layers, window = facts.config["num_hidden_layers"], facts.own.get("attention.sliding_window", 0)
    pattern = facts.own.get("attention.sliding_window_pattern", period)
    if isinstance(pattern, list):
        if len(pattern) != num_layers:
            raise facts.refuse("attention.sliding_window_pattern", f"it must have {num_layers} entries, one per layer")
        slides = pattern
    else:
        slides = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if window == 0:
        slides = [False] * num_layers
    return {
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
    }
