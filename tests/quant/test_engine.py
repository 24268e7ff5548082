"""Quantised weights from the outside: LLM, the plan, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.core.backend.opset import OpSet
from octavo.core.backend.quant import QuantFormat, QuantScheme
from octavo.core.base.config import QUANTIZATIONS, EngineConfig
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.engine.plan import plan_model
from octavo.core.engine.weight_sizes import model_bytes, packed_bytes
from octavo.core.quant.onload import KINDS
from octavo.core.quant.open import READERS
from tests.fakes import tiny_models
from tests.models.step_runner import ReferenceBackend
from tests.quant import packers, tiny_checkpoints
from tests.quant.test_formats import AWQ
from tests.quant.tiny_checkpoints import LLAMA, float_model, open_directory

OPTIONS: dict[str, Any] = {"backend": "cpu", "num_threads": 2, "progress": False, "num_kv_blocks": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPT = [5, 17, 40, 2, 81]


@pytest.fixture
def awq(tmp_path: Path) -> Path:
    model = tiny_models.make_llama(**LLAMA)
    return tiny_checkpoints.write(model, tmp_path, lambda _, shape, seed: packers.awq(seed, *shape, 16), AWQ)


def test_the_option_names_what_can_be_opened_and_made() -> None:
    assert set(QUANTIZATIONS) == {*READERS, *KINDS}


def reply(path: Path, **options: Any) -> list[int]:
    llm = LLM(str(path), **(OPTIONS | options))
    try:
        return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)
    finally:
        llm.close()


def test_a_quantised_checkpoint_needs_no_option(awq: Path) -> None:
    expected = tiny_models.greedy(float_model(awq.parent), PROMPT, 8)
    assert reply(awq) == expected
    assert reply(awq, quantization="awq") == expected


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_plain_checkpoint_is_quantised_where_asked(kind: str, tmp_path: Path) -> None:
    plain = tiny_models.save(tiny_models.make_llama(**LLAMA), tmp_path / "plain")
    found = reply(plain, quantization=kind)
    checkpoint, _ = open_directory(plain, kind)
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        checkpoint.read(name, out=tensor)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    assert found == tiny_models.greedy(float_model(tmp_path), PROMPT, 8)


@pytest.mark.parametrize(
    ("quantization", "error", "message"),
    [
        ("int8", ConfigError, "is quantised by awq"),
        ("gptq", ConfigError, "is quantised by awq"),
        ("int3", ConfigError, "int3"),
    ],
)
def test_what_does_not_fit_the_checkpoint(awq: Path, quantization: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LLM(str(awq), **OPTIONS, quantization=quantization)


def test_a_half_skipped_fused_layer_ends_the_start(tmp_path: Path) -> None:
    path = tiny_checkpoints.write(
        tiny_models.make_llama(**LLAMA),
        tmp_path,
        lambda layer, shape, seed: None if layer.endswith("0.self_attn.v_proj") else packers.awq(seed, *shape, 16),
        AWQ,
    )
    with pytest.raises(CheckpointError, match=r"v_proj plain; quantise or skip all of them"):
        LLM(str(path), **OPTIONS)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (QuantScheme(QuantFormat.INT8), 64 * 96 + 64 * 4),
        (QuantScheme(QuantFormat.INT4, 32), 64 * 96 // 2 + 64 * 3 * 4),
        (QuantScheme(QuantFormat.INT4, 64, symmetric=False), 64 * 96 // 2 + 64 * 2 * 8),
        (QuantScheme(QuantFormat.FP8_E4M3FN, 32, block_rows=32), 64 * 96 + 64 * 3 * 4),
        (QuantScheme(QuantFormat.MXFP4, 32), 64 * 96 // 2 + 64 * 3 * 4),
        (QuantScheme(QuantFormat.GGUF_Q8_0), 64 * 3 * 34),
    ],
)
def test_bytes_of_a_packed_weight(scheme: QuantScheme, expected: int) -> None:
    assert packed_bytes(scheme, 64, 96) == expected


class _Multiplies:
    """An OpSet of a device that has products for every scheme, or for none."""

    def __init__(self, has_products: bool) -> None:
        self._has_products = has_products

    def keeps_codes(self, spec: Any) -> bool:
        return self._has_products and spec.weight.scheme is not None


@pytest.mark.parametrize("has_products", [True, False])
def test_bytes_of_a_model(has_products: bool, tmp_path: Path) -> None:
    plain = tiny_models.save(tiny_models.make_llama(**LLAMA), tmp_path / "plain")
    tensors = load_file(plain / "model.safetensors")
    layers = {name for name, tensor in tensors.items() if tiny_checkpoints.is_linear(name, tensor)}
    codes = sum(tensors[name].numel() + tensors[name].shape[0] * 4 for name in layers)
    dequantised = sum(tensors[name].numel() * 2 for name in layers)
    others = sum(
        tensor.numel() * (4 if tensor.dim() == 1 else 2) for name, tensor in tensors.items() if name not in layers
    )
    checkpoint, formats = open_directory(plain, "int8")
    opset: Any = _Multiplies(has_products)
    found = model_bytes(checkpoint, formats, opset, dtype=torch.bfloat16, device=ReferenceBackend().capabilities)
    assert found == others + (codes if has_products else dequantised)


def test_a_plan_names_what_is_quantised(awq: Path) -> None:
    plan = plan_model(EngineConfig(model=str(awq), backend="cpu", num_kv_blocks=8))
    assert plan.quantised == ("int4",)
    assert f"as int4 and {plan.dtype}" in str(plan)
    plain = plan_model(EngineConfig(model=str(awq.parent / "plain"), backend="cpu", num_kv_blocks=8))
    assert plain.quantised == ()


def test_a_plan_is_of_what_the_engine_holds(awq: Path) -> None:
    """A device without products for codes holds them dequantised, in the storage dtype."""
    checkpoint, formats = open_directory(awq)
    opset = OpSet(ReferenceBackend())
    found = model_bytes(checkpoint, formats, opset, dtype=torch.float32, device=ReferenceBackend().capabilities)
    assert found == sum(tensor.numel() for tensor in load_file(awq.parent / "plain" / "model.safetensors").values()) * 4
