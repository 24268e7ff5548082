"""Registers the backend; its probe and its options. Imports no torch: the device is imported only when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.backend import Available, BackendInfo, BackendRegistry, Refusal, hookimpl


@dataclass(frozen=True, slots=True)
class AcmeOptions:
    """latency_ms: how late each kernel starts; raise it, and a wait that somebody forgot shows."""

    latency_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.latency_ms <= 1000:
            raise ValueError(f"latency_ms is {self.latency_ms}; it must lie between 0 and 1000")


def probe() -> Available | Refusal:
    """A real probe looks for its driver, and refuses with what would help: Refusal("no driver", "install …")."""
    return Available("one simulated accelerator")


@hookimpl
def register_backends(registry: BackendRegistry) -> None:
    registry.add(
        BackendInfo(
            name="acme",
            api_version=1,
            distribution="octavo-acme",
            probe="octavo_acme.plugin:probe",
            factory="octavo_acme.device:AcmeBackend",
            priority=-10,  # it pretends: "auto" must never take it
            layer_overrides={"RMSNorm": "octavo_acme.ops:override_norm"},
            options="octavo_acme.plugin:AcmeOptions",
        )
    )
