"""Adapters of experts, named as modules of a list: each row has the expert it was sent to and the adapter it brings."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.core.backend.opset import OpSet
from octavo.core.lora.experts import ExpertAdapters
from octavo.core.lora.parts import LoraPart, PartShape
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.lora.packer import Lora, make_lora
from tests.lora.world import AdapterWorld
from tests.models.step_runner import ReferenceBackend

TOLERANCE = 1e-4
NAMES = {
    "mixtral": ("model.layers.{}.block_sparse_moe.experts.{}", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.{}.mlp.experts.{}", ("gate_proj", "up_proj", "down_proj")),
}


def expert_lora(model, family, *, r, rslora, seed, which=(0, 1, 2), skip=()):
    """An adapter of attention and experts, and the model that has it merged: HF keeps all experts in one parameter."""
    prefix, names = NAMES[family]
    lora = make_lora(model, ["q_proj", "o_proj"], r=r, rslora=rslora, seed=seed)
    merged = lora.merged(model)
    generator = torch.Generator().manual_seed(seed + 100)
    scale = lora.config["lora_alpha"] / (math.sqrt(r) if rslora else r)
    layers = dict(lora.layers)
    with torch.no_grad():
        for index, layer in enumerate(merged.model.layers):
            if (experts := getattr(layer.mlp, "experts", None)) is None:
                continue
            inner = experts.down_proj.shape[2]
            for expert in range(experts.down_proj.shape[0]):
                if expert in skip:
                    continue
                gate_up, down = experts.gate_up_proj[expert], experts.down_proj[expert]
                weights = (gate_up[:inner], gate_up[inner:], down)
                for part in which:
                    rows, columns = weights[part].shape
                    a = torch.randn(r, columns, generator=generator) * 0.3
                    b = torch.randn(rows, r, generator=generator) * 0.1
                    weights[part].add_((scale * b.double() @ a.double()).float())
                    layers[f"{prefix.format(index, expert)}.{names[part]}"] = (a, b, scale)
    targets = ["q_proj", "o_proj", *(names[part] for part in which)]
    config = lora.config | {"target_modules": targets, "exclude_modules": r"model\.layers\.\d+\.mlp\.[a-z]+_proj"}
    return Lora(config, layers), merged


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize("which", [(0, 1, 2), (0,), (2,)], ids=["all", "gate", "down"])
def test_experts_equal_merged_ones(tmp_path, family, which):
    world = AdapterWorld(FAMILIES[family].make(), ReferenceBackend(), tmp_path)
    lora, merged = expert_lora(world.base, family, r=4, rslora=True, seed=1, which=which)
    world.open("a", lora, merged)
    prompt = tiny_models.random_prompt(world.runner.vocab_size, 40)
    assert world.error("a", world.runner.prompt("a", prompt), prompt) < TOLERANCE


@pytest.mark.parametrize("family", NAMES)
def test_ranks_and_scales_mixed_with_the_base_model_in_one_batch(tmp_path, family):
    """cases.md I, one adapter on MoE experts: the others have some of them, or none."""
    world = AdapterWorld(FAMILIES[family].make(), ReferenceBackend(), tmp_path)
    for seed, (name, options) in enumerate(
        {
            "r4": {"r": 4, "rslora": False},
            "r16": {"r": 16, "rslora": True},
            "some experts": {"r": 3, "rslora": False, "skip": (0, 2), "which": (1, 2)},
        }.items()
    ):
        world.open(name, *expert_lora(world.base, family, seed=seed, **options))
    world.sequence("base", None)
    world.sequence("no experts", make_lora(world.base, ["v_proj"], seed=9))
    names = ("r4", "base", "some experts", "r16", "no experts")
    prompts = {name: tiny_models.random_prompt(world.runner.vocab_size, 6 + i, i) for i, name in enumerate(names)}
    for name, logits in zip(names, world.runner.step(list(prompts.items())), strict=True):
        assert world.error(name, logits, prompts[name]) < TOLERANCE, name


def test_each_sorted_row_finds_its_slot_and_expert():
    backend = ReferenceBackend()

    def part(names):
        return LoraPart(
            PartShape(names, 4, 4, kind="expert"), backend, OpSet(backend), dtype=torch.float32, num_slots=2, max_rank=2
        )

    up, down = part(("0.up", "1.up", "2.up")), part(("0.down", "1.down", "2.down"))
    adapters = ExpertAdapters([up], down)
    adapter_T = torch.tensor([1, -1, 0], dtype=torch.int32)
    rows_N = torch.tensor([2, 0, 1, 2, 0, 0, 0, 0])  # two tail rows that no expert has
    segment_start = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    assert adapters.members(adapter_T, rows_N, segment_start) is None
    down.make_ready()
    found = adapters.members(adapter_T, rows_N, segment_start)
    assert found.dtype == torch.int32
    assert found.tolist() == [0, 3, -1, 2, 5, 5, -1, -1]
