"""A vendor's replacements of whole layers: `BackendInfo.layer_overrides`, checked before a model is built.

    {"RMSNorm": "acme.norm:override"}      override(RMSNorm) -> class AcmeNorm(RMSNorm)

A replacement is a function from the core's class to a subclass of it, so that a vendor imports nothing but the public
surface and keeps whatever it does not mean to change, above all how weights are loaded. Models ask
`LayerContext.layer(RMSNorm)` for the class to build and contain no question about devices.

A replacement with a `__call__` of its own may leave the core's op alone, or use it by `super().__call__`: the op counts
as the model's once it is called (`LayerContext.bind`). One that replaces Attention's `bind_kv` as well binds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from octavo.core.base.errors import BackendUnavailable
from octavo.core.base.names import did_you_mean
from octavo.core.layers.attention import Attention
from octavo.core.layers.embedding import Embedding, OutputHead
from octavo.core.layers.linear import Linear
from octavo.core.layers.norm import RMSNorm

LAYERS: Mapping[str, type] = {layer.__name__: layer for layer in (Attention, Embedding, Linear, OutputHead, RMSNorm)}
"""The layers that can be replaced, by name. Never written to."""


def replaced_layers(package: str, overrides: Mapping[str, Callable[[type], type]]) -> dict[str, type]:
    """The classes to build in place of the core's, by the core's names.

    Args:
        package: that brings them, for errors.
        overrides: name of a core layer -> function from its class to the replacement.

    Raises:
        BackendUnavailable: a name that is no layer, or an override that does not return a subclass.
    """
    classes = {}
    for name, override in overrides.items():
        if name not in LAYERS:
            raise BackendUnavailable(
                f"package {package} overrides layer {name!r}, which there is not{did_you_mean(name, LAYERS)}",
                field="backend",
            )
        try:
            replacement = override(LAYERS[name])
        except Exception as error:
            raise _faulty(package, name, f"failed: {type(error).__name__}: {error}") from error
        if not isinstance(replacement, type) or not issubclass(replacement, LAYERS[name]):
            raise _faulty(package, name, f"returned {replacement!r}, which is no subclass of it")
        classes[name] = replacement
    return classes


def _faulty(package: str, layer: str, fault: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"package {package}'s override of layer {layer} {fault}; upgrade {package} or report it to its authors",
        field="backend",
    )
