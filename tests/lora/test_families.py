"""Every family runs an adapter of all its linear layers as PEFT does, under the names that Hugging Face gives them."""

from __future__ import annotations

import json

import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.models import registry
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.lora.world import AdapterWorld
from tests.models.step_runner import ReferenceBackend, relative_error

TOLERANCE = 1e-4
NOT_IN_PEFT = ("llama4",)  # its router gives two results, which PEFT's layers can't
ABSORBED = ("deepseek_v2", "deepseek_v3")
DECODERS = [name for name, tiny in FAMILIES.items() if tiny.model in registry.FAMILIES and name not in NOT_IN_PEFT]


def peft_of(family, path, targets="all-linear", *, sizes=None, **options):
    """A family's model with an adapter that PEFT made, runs, and saved at a path."""
    import peft

    torch.manual_seed(3)
    model = FAMILIES[family].make(**(sizes or {}))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets, **options
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
    check(family, tmp_path, exclude_modules=["kv_b_proj"] if family in ABSORBED else None)


def check(family, tmp_path, **options):
    """Logits in two chunkings equal PEFT's, and are far from the base model's."""
    wrapped = peft_of(family, tmp_path / "adapter", **options)
    world = AdapterWorld(FAMILIES[family].make(), ReferenceBackend(), tmp_path)
    facts = world.slots.load(str(tmp_path / "adapter"))
    world.runner.slot_of["a"] = world.slots.acquire(facts.adapter_id)
    prompt = tiny_models.random_prompt(world.runner.vocab_size, 40)
    expected = tiny_models.logits_of(wrapped, prompt)
    assert relative_error(expected, tiny_models.logits_of(world.base, prompt)) > 0.05
    for chunk in (40, 9):
        assert relative_error(world.runner.prompt("a", prompt, chunk), expected) < TOLERANCE, chunk
        world.runner.finish("a")


@pytest.mark.parametrize("family", [name for name in ABSORBED if name in DECODERS])
def test_a_product_that_is_absorbed_is_refused_by_name(family, tmp_path):
    """Latent attention never computes kv_b_proj: its halves multiply queries and results."""
    peft_of(family, tmp_path / "adapter")
    world = AdapterWorld(FAMILIES[family].make(), ReferenceBackend(), tmp_path)
    with pytest.raises(CheckpointError, match="kv_b_proj is none that this model can adapt"):
        world.slots.load(str(tmp_path / "adapter"))


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:]], ids=["both", "gate_up", "down"])
def test_parameters_of_all_experts(family, parameters, tmp_path):
    """gpt-oss keeps them transposed, with rows of gate and up in turn."""
    options = {"rank_pattern": {r".*\.down_proj": 3}, "alpha_pattern": {r".*gate_up_proj": 9}, "use_rslora": True}
    check(family, tmp_path, targets=["o_proj"], target_parameters=parameters, **options)


def test_parameters_that_the_file_lacks_or_the_config_does_not_name(tmp_path):
    peft_of("mixtral", tmp_path / "adapter", ["o_proj"], target_parameters=BOTH[:1])
    file = tmp_path / "adapter" / "adapter_config.json"
    world = AdapterWorld(FAMILIES["mixtral"].make(), ReferenceBackend(), tmp_path)
    config = json.loads(file.read_text())
    for parameters, says in (
        (BOTH, "lacks down_proj, unlike target_parameters says"),
        (BOTH[1:], "has weights for gate_up_proj, unlike"),
        ([], "does not select it"),
    ):
        file.write_text(json.dumps(config | {"target_parameters": parameters}))
        with pytest.raises(CheckpointError, match=says):
            world.slots.load(str(tmp_path / "adapter"))
    file.write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(CheckpointError, match="rank 3 by adapter_config"):
        world.slots.load(str(tmp_path / "adapter"))
