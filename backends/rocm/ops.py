"""The kernels of this backend as ops, put together from groups. Each group has a file of its own."""

from __future__ import annotations

from octavo.backends.common.gpu import Gpu
from octavo.backends.common.op_groups import OpGroups


def make_ops(gpu: Gpu) -> OpGroups:  # noqa: ARG001 - goes when the first group comes
    """The ops of one device."""
    ops = OpGroups("rocm")
    return ops  # noqa: RET504 - as above
