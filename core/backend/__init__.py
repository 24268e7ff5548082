"""The backend contract: the public surface for hardware vendors, and no more than this.

Names are imported on first use, so that a plug-in can register and be probed without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.backend.builds import BuildResult, KernelBuild
    from octavo.core.backend.comm import Communicator, SingleRank
    from octavo.core.backend.device import (
        Capabilities,
        DeviceBackend,
        Event,
        MemoryInfo,
        PlainProgram,
        Program,
        StepBuffers,
        StepFunction,
    )
    from octavo.core.backend.hookspecs import hookimpl
    from octavo.core.backend.host_device import HostDevice
    from octavo.core.backend.kv import AttentionMetadata, KVCache, KVCacheSpec, KVLayout, KVPool, torch_kv_view
    from octavo.core.backend.meta import OutputShape, output_shapes
    from octavo.core.backend.ops import OP_NAMES, Epilogue, NormPrologue, Ops, PackedWeight, StepPlan
    from octavo.core.backend.opset import OpChoice, OpSet
    from octavo.core.backend.quant import (
        ACTIVATION_FORMATS,
        AffineWeight,
        QuantFormat,
        QuantizedTensor,
        QuantScheme,
    )
    from octavo.core.backend.reference.ops import ReferenceOps
    from octavo.core.backend.reference.weight import PlainWeight
    from octavo.core.backend.registry import (
        API_VERSION,
        Available,
        BackendConfig,
        BackendInfo,
        BackendRegistry,
        Refusal,
    )
    from octavo.core.backend.specs import (
        ActivationKind,
        AttentionSpec,
        CacheSpec,
        Gate,
        GemmSpec,
        GroupedGemmSpec,
        LoraSpec,
        OpSpec,
        RowSpec,
        ScaleKind,
        Unsupported,
        WeightSpec,
    )
    from octavo.core.backend.workloads import Cost, Prepared, Tensors, Workload, list_workloads
    from octavo.core.base.errors import BackendUnavailable, OctavoError, RankLost, UnsupportedOp

_PUBLIC = {
    "builds": ("BuildResult", "KernelBuild"),
    "comm": ("Communicator", "SingleRank"),
    "device": (
        "Capabilities",
        "DeviceBackend",
        "Event",
        "MemoryInfo",
        "PlainProgram",
        "Program",
        "StepBuffers",
        "StepFunction",
    ),
    "hookspecs": ("hookimpl",),
    "host_device": ("HostDevice",),
    "kv": ("AttentionMetadata", "KVCache", "KVCacheSpec", "KVLayout", "KVPool", "torch_kv_view"),
    "meta": ("OutputShape", "output_shapes"),
    "ops": ("OP_NAMES", "Epilogue", "NormPrologue", "Ops", "PackedWeight", "StepPlan"),
    "opset": ("OpChoice", "OpSet"),
    "quant": ("ACTIVATION_FORMATS", "AffineWeight", "QuantFormat", "QuantScheme", "QuantizedTensor"),
    "reference.ops": ("ReferenceOps",),
    "reference.weight": ("PlainWeight",),
    "registry": ("API_VERSION", "Available", "BackendConfig", "BackendInfo", "BackendRegistry", "Refusal"),
    "specs": (
        "ActivationKind",
        "AttentionSpec",
        "CacheSpec",
        "Gate",
        "GemmSpec",
        "GroupedGemmSpec",
        "LoraSpec",
        "OpSpec",
        "RowSpec",
        "ScaleKind",
        "Unsupported",
        "WeightSpec",
    ),
    "workloads": ("Cost", "Prepared", "Tensors", "Workload", "list_workloads"),
}
_ERRORS = ("BackendUnavailable", "OctavoError", "RankLost", "UnsupportedOp")
"""What the contract asks a backend to raise."""

_HOMES = {name: f"{__name__}.{module}" for module, names in _PUBLIC.items() for name in names}
_HOMES |= dict.fromkeys(_ERRORS, "octavo.core.base.errors")

__all__ = [
    "ACTIVATION_FORMATS",
    "API_VERSION",
    "OP_NAMES",
    "ActivationKind",
    "AffineWeight",
    "AttentionMetadata",
    "AttentionSpec",
    "Available",
    "BackendConfig",
    "BackendInfo",
    "BackendRegistry",
    "BackendUnavailable",
    "BuildResult",
    "CacheSpec",
    "Capabilities",
    "Communicator",
    "Cost",
    "DeviceBackend",
    "Epilogue",
    "Event",
    "Gate",
    "GemmSpec",
    "GroupedGemmSpec",
    "HostDevice",
    "KVCache",
    "KVCacheSpec",
    "KVLayout",
    "KVPool",
    "KernelBuild",
    "LoraSpec",
    "MemoryInfo",
    "NormPrologue",
    "OctavoError",
    "OpChoice",
    "OpSet",
    "OpSpec",
    "Ops",
    "OutputShape",
    "PackedWeight",
    "PlainProgram",
    "PlainWeight",
    "Prepared",
    "Program",
    "QuantFormat",
    "QuantScheme",
    "QuantizedTensor",
    "RankLost",
    "ReferenceOps",
    "Refusal",
    "RowSpec",
    "ScaleKind",
    "SingleRank",
    "StepBuffers",
    "StepFunction",
    "StepPlan",
    "Tensors",
    "Unsupported",
    "UnsupportedOp",
    "WeightSpec",
    "Workload",
    "hookimpl",
    "list_workloads",
    "output_shapes",
    "torch_kv_view",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
