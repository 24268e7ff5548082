"""GpuBackend over a LateDevice, as a plug-in: the device layer of GPUs under a whole engine, without a GPU.

static_ops() are ops in plain torch that a recording can hold: no host read, no shape that numbers decide. All others
fall back to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.backends.common.chip import Chip
from octavo.backends.common.device import GpuBackend
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.op_groups import OpGroups
from octavo.backends.common.options import GpuOptions
from octavo.backends.common.tuning import TuningTable
from octavo.backends.cuda.chips import H200
from octavo.core.backend import (
    API_VERSION,
    AttentionMetadata,
    Available,
    BackendConfig,
    BackendInfo,
    BackendRegistry,
    KVCache,
    OpSpec,
    StepPlan,
    Unsupported,
    hookimpl,
)
from tests.fakes.late_device import LateDevice, LateRuntime

CHIP = replace(H200, name="a late device", arch="late")


class StaticOps:
    """Paged attention and cache writes with shapes that only the step's padding decides."""

    def supports(self, op: str, spec: OpSpec) -> Unsupported | None:
        return None

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        return StepPlan(meta)

    def write_kv(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv: KVCache, slot_mapping_T: torch.Tensor, **_: Any
    ) -> None:
        """Slot -1 writes to slot 0, which is the engine's null block."""
        slots_T = slot_mapping_T.clamp(min=0)
        size = kv.spec.block_size
        assert kv.key_NSKD is not None
        assert kv.value_NSKD is not None
        kv.key_NSKD.index_put_((slots_T // size, slots_T % size), k_TKD)
        kv.value_NSKD.index_put_((slots_T // size, slots_T % size), v_TKD)

    def paged_attention(
        self,
        q_THD: torch.Tensor,
        kv: KVCache,
        plan: StepPlan,
        *,
        out: torch.Tensor,
        softmax_scale: float,
        window: int | None = None,
        **_: Any,
    ) -> None:
        meta = plan.meta
        assert kv.key_NSKD is not None
        assert kv.value_NSKD is not None
        num_tokens, num_heads = q_THD.shape[:2]
        row_T = torch.arange(num_tokens, device=q_THD.device)
        ends = meta.query_start_loc[1:].long()
        request_T = torch.searchsorted(ends, row_T, right=True).clamp(max=len(ends) - 1)
        position_T = meta.seq_lens[request_T] - (ends[request_T] - row_T)
        k_TLKD, v_TLKD = (
            part[meta.block_table[request_T].long()].flatten(1, 2) for part in (kv.key_NSKD, kv.value_NSKD)
        )
        groups = num_heads // k_TLKD.shape[2]
        k_TLHD, v_TLHD = (part.repeat_interleave(groups, dim=2).float() for part in (k_TLKD, v_TLKD))
        key_L = torch.arange(k_TLHD.shape[1], device=q_THD.device)
        seen_TL = (key_L <= position_T[:, None]) & (row_T < ends[-1])[:, None]
        if window is not None:
            seen_TL &= key_L > position_T[:, None] - window
        scores_THL = torch.einsum("thd,tlhd->thl", q_THD.float(), k_TLHD) * softmax_scale
        weights_THL = scores_THL.masked_fill(~seen_TL[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        v_TLHD = v_TLHD.masked_fill(~seen_TL[..., None, None], 0.0)
        out.copy_(torch.einsum("thl,tlhd->thd", weights_THL, v_TLHD))


def static_ops(gpu: Gpu) -> OpGroups:
    """Plain torch ops that a recording can hold; nothing of a device is asked."""
    assert gpu.device.index == 0
    ops = OpGroups("late")
    ops.take(StaticOps(), ops=("paged_attention", "write_kv"), besides=("plan",))
    return ops


def bare_ops(gpu: Gpu) -> OpGroups:
    """None: all fall back."""
    assert gpu.device.index == 0
    return OpGroups("late")


MakeOps = Callable[[Gpu], Any]


class LateBackend(GpuBackend):
    """The device layer over one LateDevice."""

    name = "late"

    def __init__(
        self,
        config: BackendConfig,
        device: LateDevice,
        make_ops: MakeOps = static_ops,
        chip: Chip = CHIP,
        tuning: TuningTable | None = None,
    ) -> None:
        tuning = tuning or TuningTable([])
        super().__init__(config, LateRuntime(device), chip, tuning, make_ops, device.launch)


def probe() -> Available:
    return Available("runs late")


def register(
    monkeypatch: pytest.MonkeyPatch, device: LateDevice, make_ops: MakeOps = static_ops, **parts: Any
) -> list[LateBackend]:
    """Let engines of this test find the backend "late"; returns those that were made, oldest first."""
    made: list[LateBackend] = []

    def make(config: BackendConfig) -> LateBackend:
        made.append(LateBackend(config, device, make_ops, **parts))
        return made[-1]

    class Plugin:
        @hookimpl
        def register_backends(self, registry: BackendRegistry) -> None:
            registry.add(
                BackendInfo(
                    name="late",
                    api_version=API_VERSION,
                    distribution="octavo-late",
                    probe=f"{__name__}:probe",
                    factory=f"{__name__}:make",
                    priority=-1,
                    options=f"{GpuOptions.__module__}:{GpuOptions.__name__}",
                )
            )

    discover = BackendRegistry.discover

    def discover_with_late() -> BackendRegistry:
        registry = discover()
        registry.register(Plugin(), "octavo-late")
        return registry

    monkeypatch.setattr(BackendRegistry, "discover", staticmethod(discover_with_late))
    monkeypatch.setattr(f"{__name__}.make", make, raising=False)
    return made
