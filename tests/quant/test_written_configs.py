"""The configs that Hugging Face's own classes write are read: what they say beside the numbers changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.quant import packers
from tests.quant.packers import Packed
from tests.quant.test_formats import NAME

FP8 = packers.fp8_codes(0, 128, 128)
EXPERTS = {f"m.experts.down_proj_{part}": tensor for part, tensor in packers.mxfp4(0, 1, 4, 1).tensors.items()}


def named(packed: Packed) -> dict[str, torch.Tensor]:
    return packed.named(NAME)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "awq": ("AwqConfig", {"group_size": 16}, named(packers.awq(0, 16, 32, 16))),
    "gptq": ("GPTQConfig", {"bits": 4, "group_size": 16}, named(packers.gptq(0, 32, 32, 16, symmetric=True))),
    "mxfp4": ("Mxfp4Config", {}, EXPERTS),
    "fp8": ("FineGrainedFP8Config", {}, {f"{NAME}.weight": FP8, f"{NAME}.weight_scale_inv": torch.ones(1, 1)}),
    "fbgemm": ("FbgemmFp8Config", {}, {f"{NAME}.weight": FP8, f"{NAME}.weight_scale": torch.ones(128, 1)}),
    "int8": ("BitsAndBytesConfig", {"load_in_8bit": True}, named(packers.llm_int8(0, 8, 16))),
    "nf4": (
        "BitsAndBytesConfig",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
        named(packers.four_bit(0, 8, 16)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_config_as_written(case: str, open_with: Callable[..., Any]) -> None:
    from transformers.utils import quantization_config

    name, options, tensors = CASES[case]
    written = getattr(quantization_config, name)(**options).to_dict()
    checkpoint, _ = open_with(tensors, {key: getattr(value, "value", value) for key, value in written.items()})
    (weight,) = checkpoint.names()
    assert bool(checkpoint.read(weight, out=torch.empty(checkpoint.shape(weight))).isfinite().all())
