"""Octavo: one scheduler and one block manager drive any device through a backend plug-in.

The public names below are imported on first use, so that `import octavo` costs nothing and the command line can
answer `--help` without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.base.config import EngineConfig
    from octavo.core.base.errors import OctavoError, UserError
    from octavo.core.base.lora import LoRARequest
    from octavo.core.base.params import FinishReason, SamplingParams
    from octavo.core.base.pooling import PoolingParams
    from octavo.core.base.structured import StructuredOutput, StructuredOutputsParams
    from octavo.core.engine.async_engine import AsyncEngine
    from octavo.core.engine.llm import LLM
    from octavo.core.engine.outputs import CompletionOutput, RequestOutput
    from octavo.core.engine.pooling_outputs import PoolingRequestOutput

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "FinishReason",
    "LoRARequest",
    "OctavoError",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutput",
    "StructuredOutputsParams",
    "UserError",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.core.engine.llm",
    "AsyncEngine": "octavo.core.engine.async_engine",
    "CompletionOutput": "octavo.core.engine.outputs",
    "EngineConfig": "octavo.core.base.config",
    "FinishReason": "octavo.core.base.params",
    "LoRARequest": "octavo.core.base.lora",
    "OctavoError": "octavo.core.base.errors",
    "PoolingParams": "octavo.core.base.pooling",
    "PoolingRequestOutput": "octavo.core.engine.pooling_outputs",
    "RequestOutput": "octavo.core.engine.outputs",
    "SamplingParams": "octavo.core.base.params",
    "StructuredOutput": "octavo.core.base.structured",
    "StructuredOutputsParams": "octavo.core.base.structured",
    "UserError": "octavo.core.base.errors",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its home on first use, and keep it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
