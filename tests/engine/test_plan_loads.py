"""What a plan says of a checkpoint beside what loading it then takes: packed weights, KV pools, blocks and lengths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend.ops import PackedWeight
from octavo.core.backend.opset import OpSet
from octavo.core.base.config import EngineConfig
from octavo.core.engine.plan import Plan, plan_model
from octavo.core.load.checkpoint import open_checkpoint
from octavo.core.load.resolve import resolve_model
from tests.engine.worlds import engine_of
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.quant import tiny_checkpoints
from tests.quant.test_models import CASES
from tests.quant.tiny_checkpoints import LLAMA

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 1, "progress": False, "kv_cache_memory_bytes": 1 << 20}
WHOLE_PANELS: dict[str, dict[str, int]] = {
    "llama": {"vocab_size": 208, "intermediate_size": 96},
    "gemma2": {"vocab_size": 208, "intermediate_size": 64},
    "phi3": {"vocab_size": 208, "intermediate_size": 64},
    "mixtral": {"vocab_size": 208, "intermediate_size": 64},
    "deepseek_v3": {"vocab_size": 208, "intermediate_size": 64, "moe_intermediate_size": 32},
}
"""Sizes that the CPU packs without padding, which of a real model is far below a hundredth."""
MARGIN = 0.012
"""Routers of four experts and narrow latent products are padded to 16 rows; a share of these small models."""


class Loads:
    """Plans a model, loads it, and keeps what the backend was asked for meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._weights: list[PackedWeight] = []
        self._pool_bytes: list[int] = []
        prepare, allocate = OpSet.prepare_weight, CpuBackend.allocate_kv_pool

        def prepared(opset: OpSet, *args: Any, **options: Any) -> PackedWeight:
            self._pool_bytes.clear()  # what was allocated before the model was a check of the device
            self._weights.append(prepare(opset, *args, **options))
            return self._weights[-1]

        def allocated(backend: CpuBackend, num_blocks: int, block_bytes: int) -> Any:
            self._pool_bytes.append(num_blocks * block_bytes)
            return allocate(backend, num_blocks, block_bytes)

        monkeypatch.setattr(OpSet, "prepare_weight", prepared)
        monkeypatch.setattr(CpuBackend, "allocate_kv_pool", allocated)

    def plan(self, path: Path | str, **options: Any) -> Plan:
        """The plan, all of whose blocks and lengths the engine was found to have."""
        config = EngineConfig(model=str(path), **(OPTIONS | options))
        plan = plan_model(config)
        assert not self._weights
        engine = engine_of(config)
        try:
            if plan.num_kv_blocks:
                assert engine.num_kv_blocks == plan.num_kv_blocks
            assert (engine.sizes.max_model_len, engine.sizes.block_size) == (plan.max_model_len, plan.block_size)
        finally:
            engine.close()
        return plan

    def check_bytes(self, path: Path | str, plan: Plan, *, margin: float = MARGIN) -> None:
        """Compare the plan's bytes with those of weights that were packed, vectors (fp32) and KV pools."""
        checkpoint = open_checkpoint(resolve_model(str(path)))
        shapes = [checkpoint.shape(name) for name in checkpoint.names()]
        checkpoint.close()
        vectors = 4 * sum(math.prod(shape) for shape in shapes if len(shape) == 1)
        packed = {id(weight): weight.nbytes for weight in self._weights}
        assert sum(packed.values()) + vectors == pytest.approx(plan.weight_bytes, rel=margin)
        assert sum(self._pool_bytes) == plan.kv_bytes


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    return Loads(monkeypatch)


@pytest.mark.parametrize("family", WHOLE_PANELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families(loads: Loads, family: str, dtype: str, tmp_path: Path) -> None:
    path = tiny_models.save(FAMILIES[family].make(**WHOLE_PANELS[family]), tmp_path)
    loads.check_bytes(path, loads.plan(path, dtype=dtype))


@pytest.mark.parametrize(
    ("case", "keeps_codes"),
    [("awq", True), ("gptq", True), ("compressed-w8a8", True), ("llm-int8", True), ("fp8-blocks", False)],
)
def test_quantised_checkpoints(loads: Loads, case: str, keeps_codes: bool, tmp_path: Path) -> None:
    """Codes that the cpu multiplies are counted as it packs them, others dequantised, as they are then kept."""
    pack, config = CASES[case]
    path = tiny_checkpoints.write(tiny_models.make_llama(**(LLAMA | {"vocab_size": 96})), tmp_path, pack, config)
    plan = loads.plan(path)
    loads.check_bytes(path, plan, margin=0.04)  # scales and orders that lie in the files as vectors
    plain_bytes = plan_model(EngineConfig(model=str(tmp_path / "plain"), **OPTIONS)).weight_bytes
    assert plan.weight_bytes < 0.5 * plain_bytes if keeps_codes else plan.weight_bytes == plain_bytes


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_quantised_at_load(loads: Loads, kind: str, tmp_path: Path) -> None:
    path = tiny_models.save(FAMILIES["llama"].make(**WHOLE_PANELS["llama"]), tmp_path)
    loads.check_bytes(path, loads.plan(path, quantization=kind))


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_memory_bytes": None},
        {"kv_cache_memory_bytes": None, "num_kv_blocks": 40},
        {"block_size": 32, "max_model_len": 100},
        {"enable_lora": True, "max_loras": 4},
    ],
)
def test_options(loads: Loads, options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_models.save(FAMILIES["llama"].make(**WHOLE_PANELS["llama"]), tmp_path)
    loads.check_bytes(path, loads.plan(path, **options))


def test_two_ranks(loads: Loads, tmp_path: Path) -> None:
    """Their memory is in processes of their own; blocks and lengths are compared."""
    path = tiny_models.save(FAMILIES["llama"].make(**WHOLE_PANELS["llama"]), tmp_path)
    loads.plan(path, tensor_parallel_size=2)


def test_an_encoder(loads: Loads) -> None:
    loads.check_bytes("minilm", loads.plan("minilm"))
