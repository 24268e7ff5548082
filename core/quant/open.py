"""From an opened checkpoint to one whose quantised layers can be read, and what layers must know of them.

    config["quantization_config"]["quant_method"]  ─┬─ none            as it is; quantised at load where asked;
                                                    │                  a GGUF file keeps blocks that are multiplied
                                                    ├─ a known one     its reader
                                                    └─ another         refused, with the known ones

Nothing is read but headers, and what tells shapes and orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.quant.awq import awq_layers
from octavo.core.quant.bitsandbytes import bitsandbytes_layers
from octavo.core.quant.checkpoint import QuantizedCheckpoint, StoredFormats
from octavo.core.quant.compressed import compressed_layers
from octavo.core.quant.formats import PLAIN, WeightFormats
from octavo.core.quant.fp8 import fp8_layers
from octavo.core.quant.gguf import gguf_layers
from octavo.core.quant.gptq import gptq_layers
from octavo.core.quant.kv_scheme import read_kv_scheme
from octavo.core.quant.layer import Files, StoredLayer
from octavo.core.quant.mxfp4 import mxfp4_layers
from octavo.core.quant.onload import KINDS, onload_layers

if TYPE_CHECKING:
    from octavo.core.backend.quant import QuantScheme
    from octavo.core.load.checkpoint import Checkpoint

Reader = Callable[[Files, Mapping[str, Any]], dict[str, StoredLayer]]

READERS: Mapping[str, Reader] = {
    "awq": awq_layers,
    "gptq": gptq_layers,
    "compressed-tensors": compressed_layers,
    "fp8": fp8_layers,
    "fbgemm_fp8": fp8_layers,
    "bitsandbytes": bitsandbytes_layers,
    "mxfp4": mxfp4_layers,
}
"""The formats of quantised checkpoints, by the name that their config gives. Never written to."""

_PARTS = tuple(
    f".{suffix}"
    for suffix in (
        "qweight", "qzeros", "g_idx", "SCB", "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point",
        "weight_g_idx", "weight.absmax", "weight.quant_map",
    )
)  # fmt: skip
"""How names of tensors end that are never of a plain layer."""


def open_quantized(
    checkpoint: Checkpoint,
    quantization: str | None = None,
    *,
    multiplies: Callable[[QuantScheme], bool] | None = None,
) -> tuple[Checkpoint, WeightFormats]:
    """A checkpoint with one weight per layer, and how each is stored.

    Args:
        checkpoint: as `open_checkpoint` gave it; it is closed with the one that is returned.
        quantization: a key of `KINDS` quantises a plain checkpoint while it is read; the name of the format that the
            checkpoint has is accepted, too; None takes it as it is.
        multiplies: whether the device has a product for weights of a scheme; blocks of a GGUF file are kept where it
            has one, and dequantised by the file's reader elsewhere, or where it is not said.

    Raises:
        CheckpointError: a format that is not known, or files that contradict their config.
        ConfigError: `quantization` does not fit the checkpoint.
    """
    config = checkpoint.config.get("quantization_config")
    if not config:
        if quantization is None and checkpoint.format == "gguf" and multiplies is not None:
            return _wrapped(checkpoint, gguf_layers(Files(checkpoint), multiplies), mixes=True)
        return _plain(checkpoint, quantization)
    method = _method(config)
    if quantization not in (None, method):
        raise ConfigError(
            f"quantization is {quantization!r}, but {checkpoint.path} is quantised by {method}; leave it out",
            field="quantization",
        )
    layers, kv_scheme = READERS[method](Files(checkpoint), config), read_kv_scheme(config)
    if not layers and kv_scheme is None:
        raise CheckpointError(
            f"{checkpoint.path}: quantization_config names {method}, but no tensor is stored so; config and files do "
            "not belong together",
            field="quantization_config",
        )
    _refuse_strays(checkpoint, layers)
    return QuantizedCheckpoint(checkpoint, layers), StoredFormats(layers, kv_scheme)


def _refuse_strays(checkpoint: Checkpoint, layers: Mapping[str, StoredLayer]) -> None:
    """Refuse a scale, or another part of a quantised layer, that belongs to none: its weight would be read plain."""
    owned = {part for layer in layers.values() for part in layer.tensors}
    for name in checkpoint.names():
        if name.endswith(_PARTS) and name not in owned:
            raise CheckpointError(
                f"{checkpoint.path}: {name} belongs to a quantised layer, but no weight beside it is stored so; the "
                "files are damaged or belong to another quantization_config: download them again",
                field=name,
            )


def _wrapped(
    checkpoint: Checkpoint, layers: Mapping[str, StoredLayer], *, made: str = "", mixes: bool = False
) -> tuple[Checkpoint, WeightFormats]:
    if not layers:
        return checkpoint, PLAIN
    return QuantizedCheckpoint(checkpoint, layers, made=made), StoredFormats(layers, mixes=mixes)


def _plain(checkpoint: Checkpoint, quantization: str | None) -> tuple[Checkpoint, WeightFormats]:
    if quantization is None:
        return checkpoint, PLAIN
    if quantization not in KINDS:
        raise ConfigError(
            f"quantization is {quantization!r}, but {checkpoint.path} is not quantised so; a plain checkpoint can be "
            f"quantised to {', '.join(KINDS)} while it loads",
            field="quantization",
        )
    return _wrapped(checkpoint, onload_layers(checkpoint, quantization), made=quantization)


def _method(config: Any) -> str:
    """The key of `READERS` that a `quantization_config` names."""
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if not isinstance(method, str) or method.lower() not in READERS:
        raise CheckpointError(
            f"config.json: quantization_config.quant_method is {method!r}; {', '.join(READERS)} can be loaded",
            field="quantization_config",
        )
    return method.lower()
