"""Where kernels find `Cost`."""

from octavo.core.backend.workloads.base import Cost

__all__ = ["Cost"]
