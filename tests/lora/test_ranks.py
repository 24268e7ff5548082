"""Adapters of a model that is split over ranks: each rank adds its part, and all come to the same bits."""

from __future__ import annotations

import pytest
import torch

from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.lora.slots import AdapterSlots
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.lora.packer import make_lora
from tests.lora.test_families import peft_of
from tests.models.rank_runner import RankRunner
from tests.models.step_runner import ReferenceBackend, relative_error

TOLERANCE = 1e-4
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "embed_tokens"]


def run(model, adapter, folder, size, prompt, **options):
    """Logits of a prompt with the adapter at a path, on every rank."""
    checkpoint = open_checkpoint(ModelSource("tiny", tiny_models.save(model, folder / "model"), "safetensors"))
    made = []

    def make_slots(opset):
        slots = AdapterSlots(
            ReferenceBackend(),
            opset,
            dtype=torch.float32,
            max_tokens=256,
            max_loras=2,
            max_lora_rank=8,
            max_cpu_loras=4,
        )
        made.append(slots)
        return slots

    runner = RankRunner(checkpoint, size, adapters=make_slots, **options)
    try:
        facts = [slots.load(str(adapter)) for slots in made]
        assert all(other == facts[0] for other in facts)  # the engine's ranks must come to one answer
        assert len({slots.acquire(each.adapter_id) for slots, each in zip(made, facts, strict=True)}) == 1
        for rank in runner.runners:
            rank.slot_of = {"a": 0}
        return runner.prompt("a", prompt, 9)
    finally:
        runner.close()
        checkpoint.close()


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, {}),
        (4, {"num_attention_heads": 8, "num_key_value_heads": 2}),
        (4, {"num_attention_heads": 4, "vocab_size": 197}),
    ],
    ids=["two", "kv-heads-shared", "vocabulary-padded"],
)
def test_every_layer(tmp_path, size, changes):
    model = tiny_models.make_llama(**changes)
    lora = make_lora(model, EVERYTHING, r=5, rslora=True)
    prompt = tiny_models.random_prompt(model.config.vocab_size, 30)
    found = run(model, lora.save(tmp_path / "adapter"), tmp_path, size, prompt)
    assert relative_error(found, tiny_models.logits_of(lora.merged(model), prompt)) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "expert_parallel"),
    [("phi3", False), ("mixtral", False), ("mixtral", True), ("deepseek_v3", False), ("deepseek_v3", True)],
)
def test_fused_layers_and_experts(tmp_path, family, expert_parallel):
    """phi3's q, k and v are one layer of the checkpoint; experts are cut, or shared out whole."""
    field = {"mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}.get(family)
    sizes = {} if field is None else {field: 8}
    exclude = ["kv_b_proj"] if family == "deepseek_v3" else None
    wrapped = peft_of(family, tmp_path / "adapter", exclude_modules=exclude, sizes=sizes)
    model = FAMILIES[family].make(**sizes)
    prompt = tiny_models.random_prompt(model.config.vocab_size, 30)
    found = run(model, tmp_path / "adapter", tmp_path, 2, prompt, expert_parallel=expert_parallel)
    assert relative_error(found, tiny_models.logits_of(wrapped, prompt)) < TOLERANCE
