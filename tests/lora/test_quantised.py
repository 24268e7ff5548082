"""Adapters of a quantised model equal those of the float model of its dequantised weights."""

from __future__ import annotations

import pytest

from tests.fakes import tiny_models
from tests.lora.packer import make_lora
from tests.lora.world import AdapterWorld
from tests.quant import tiny_checkpoints
from tests.quant.test_models import CASES, code_backend
from tests.quant.tiny_checkpoints import LLAMA, float_model, open_directory

TARGETS = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.mark.parametrize("case", ["awq", "gptq-act-order"])
def test_a_product_over_codes_and_one_whose_inputs_are_reordered(case, tmp_path):
    """With act-order the product gathers its inputs; the adapter reads them as they come."""
    pack, config = CASES[case]
    path = tiny_checkpoints.write(tiny_models.make_llama(**LLAMA), tmp_path, pack, config)
    backend = code_backend()
    world = AdapterWorld(float_model(tmp_path), backend, tmp_path, opened=open_directory(path))
    assert backend.ops.schemes
    world.sequence("a", make_lora(world.base, TARGETS, r=5))
    prompt = tiny_models.random_prompt(97, 30)
    for name in ("a", "base"):
        if name == "base":
            world.sequence("base", None)
        assert world.error(name, world.runner.prompt(name, prompt, 9), prompt) < 1e-4
