"""Whether a checkpoint's header tells of the model that its config describes, before anything is allocated for it."""

from __future__ import annotations

from octavo.core.base.errors import CheckpointError
from octavo.core.load.checkpoint import Checkpoint
from octavo.core.models.base import ModelConfig
from octavo.core.models.decoder.config import DecoderConfig

_SLACK = 4
"""Widths that are this many times the longest side of any tensor are of another model, whatever is fused or split."""


def check_header(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare what is cheap to compare: the embedding's shape, the number of layers, and roughly the widths.

    Every tensor is compared when the model has been built; this keeps absurd sizes from being built.

    Raises:
        CheckpointError: naming the field of the config and what the files hold.
    """
    if not isinstance(config, DecoderConfig):
        return
    names = set(checkpoint.names())
    embedding = f"{config.names.embedding}.weight"
    wanted = (config.vocab_size, config.hidden_size)
    if embedding in names and checkpoint.shape(embedding) != wanted:
        raise _mismatch(
            checkpoint, "hidden_size", f"vocab_size and hidden_size are {list(wanted)}",
            f"tensor {embedding} has shape {list(checkpoint.shape(embedding))}",
        )  # fmt: skip

    def has_layer(index: int) -> bool:
        return any(name.startswith(config.names.layer.format(index) + ".") for name in names)

    if has_layer(0) and not has_layer(config.num_layers - 1):
        raise _mismatch(
            checkpoint, "num_hidden_layers", f"num_hidden_layers is {config.num_layers}", "the last one is not there"
        )
    _check_widths(checkpoint, config)


def _check_widths(checkpoint: Checkpoint, config: DecoderConfig) -> None:
    """Refuse widths that no tensor comes near: their buffers would take all memory before shapes are compared."""
    longest = max((side for name in checkpoint.names() for side in checkpoint.shape(name)), default=0)
    widths = {
        "num_attention_heads": ("num_attention_heads * head_dim", config.num_heads * config.head_dim),
        "intermediate_size": ("intermediate_size", config.intermediate_size),
    }
    for field, (what, width) in widths.items():
        if width > _SLACK * longest:
            raise _mismatch(checkpoint, field, f"{what} is {width}", f"no tensor is longer than {longest}")


def _mismatch(checkpoint: Checkpoint, field: str, says: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.path}: the config says that {says}, but {found}; the config and the weights belong to different "
        "models",
        field=field,
    )
