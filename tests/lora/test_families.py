"""Every family runs an adapter of all its linear layers as PEFT does, under the names that Hugging Face gives them."""

from __future__ import annotations

import pytest
import torch

from octavo.core.models import registry
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.lora.world import AdapterWorld
from tests.models.step_runner import ReferenceBackend, relative_error

TOLERANCE = 1e-4
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "llama4")
DECODERS = [name for name, tiny in FAMILIES.items() if tiny.model in registry.FAMILIES and name not in WITH_EXPERTS]


def peft_of(family, path, **options):
    import peft

    torch.manual_seed(3)
    model = FAMILIES[family].make()
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=4, init_lora_weights=False, target_modules="all-linear", **options
    )
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.3)
    wrapped.save_pretrained(path)
    return wrapped


@pytest.mark.parametrize("family", DECODERS)
def test_all_linear(family, tmp_path):
    wrapped = peft_of(family, tmp_path / "adapter")
    world = AdapterWorld(FAMILIES[family].make(), ReferenceBackend(), tmp_path)
    facts = world.slots.load(str(tmp_path / "adapter"))
    world.runner.slot_of["a"] = world.slots.acquire(facts.adapter_id)
    prompt = tiny_models.random_prompt(world.runner.vocab_size, 40)
    expected = tiny_models.logits_of(wrapped, prompt)
    assert relative_error(expected, tiny_models.logits_of(world.base, prompt)) > 0.05
    for chunk in (40, 9):
        assert relative_error(world.runner.prompt("a", prompt, chunk), expected) < TOLERANCE, chunk
        world.runner.finish("a")
