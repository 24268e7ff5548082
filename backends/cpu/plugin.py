"""Registers the CPU backend. Imports no torch: the device is imported only when it is chosen."""

from __future__ import annotations

from octavo.core.backend import API_VERSION, BackendInfo, BackendRegistry, hookimpl


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="cpu",
            api_version=API_VERSION,
            distribution="octavo",
            probe="octavo.backends.cpu.probe:probe",
            factory="octavo.backends.cpu.device:CpuBackend",
            priority=0,
        )
    )
