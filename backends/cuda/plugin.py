"""Registers the backend cuda. Imports no torch: the device is imported only when it is chosen."""

from __future__ import annotations

from octavo.core.backend import API_VERSION, BackendInfo, BackendRegistry, hookimpl


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="cuda",
            api_version=API_VERSION,
            distribution="octavo",
            probe="octavo.backends.cuda.probe:probe",
            factory="octavo.backends.cuda.device:CudaBackend",
            priority=10,
            builds="octavo.backends.cuda.builds:builds",
            tune="octavo.backends.common.tune:retuned",
            options="octavo.backends.common.options:GpuOptions",
        )
    )
