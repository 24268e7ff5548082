"""The one hook by which a package brings backends.

In the vendor's package, named by the entry-point group "octavo.backends":

    from octavo.core.backend import BackendInfo, BackendRegistry, hookimpl

    @hookimpl
    def register_backends(registry: BackendRegistry) -> None:
        registry.add(BackendInfo(name="acme", ...))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from octavo.core.backend.registry import BackendRegistry

PROJECT = "octavo"
ENTRY_POINT_GROUP = "octavo.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plug-in's implementation of a hook."""


@hookspec(historic=True)
def register_backends(registry: BackendRegistry) -> None:
    """Call `registry.add(BackendInfo(...))` for each backend of the package. Must import no torch."""
