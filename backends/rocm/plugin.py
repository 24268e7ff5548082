"""Registers the backend rocm. Imports no torch: the device is imported only when it is chosen."""

from __future__ import annotations

from octavo.core.backend import API_VERSION, BackendInfo, BackendRegistry, hookimpl


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="rocm",
            api_version=API_VERSION,
            distribution="octavo",
            probe="octavo.backends.rocm.probe:probe",
            factory="octavo.backends.rocm.device:RocmBackend",
            priority=10,
            builds="octavo.backends.rocm.builds:builds",
            tune="octavo.backends.common.tune:retuned",
            options="octavo.backends.common.options:GpuOptions",
        )
    )
