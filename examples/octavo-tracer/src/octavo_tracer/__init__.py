"""A backend that compiles the step as a whole: the road for NPU-like compilers. Registers itself; imports no torch."""

from __future__ import annotations

from octavo.core.backend import Available, BackendInfo, BackendRegistry, hookimpl


def probe() -> Available:
    return Available("whole steps, traced at fixed shapes")


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="tracer",
            api_version=1,
            distribution="octavo-tracer",
            probe="octavo_tracer:probe",
            factory="octavo_tracer.device:TracerBackend",
            priority=-10,
        )
    )
