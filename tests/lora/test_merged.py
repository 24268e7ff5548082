"""Logits with adapters equal those of a model that has them merged into its weights: W + scale * B @ A."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig
from tests.fakes import tiny_models
from tests.lora.packer import make_lora
from tests.lora.world import AdapterWorld
from tests.models.step_runner import ReferenceBackend

TOLERANCE = 1e-4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = ReferenceBackend() if request.param == "reference" else CpuBackend(BackendConfig(num_threads=1))
    yield made
    made.close()


def check_prompt(world, name, length, chunk=None):
    prompt = tiny_models.random_prompt(world.runner.vocab_size, length)
    assert world.error(name, world.runner.prompt(name, prompt, chunk), prompt) < TOLERANCE


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["q_proj", "v_proj"], {}),
        (["k_proj"], {"r": 1}),
        ([*ATTENTION, *FEED_FORWARD], {"r": 8, "rslora": True}),
        (["gate_proj"], {}),
        (["up_proj", "down_proj"], {"r": 3, "alpha": 5}),
        (["lm_head"], {"r": 6}),
        (["embed_tokens"], {"r": 6}),
        (["embed_tokens", "lm_head", "o_proj"], {"rslora": True}),
        (["q_proj", "down_proj"], {"ranks": {"layers.1.self_attn.q_proj": 2, "down_proj": 7}}),
        (["q_proj", "down_proj"], {"alphas": {"layers.0.self_attn.q_proj": 32, "down_proj": 1}, "rslora": True}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else ",".join(map(str, value.items())),
)
def test_one_adapter(backend, tmp_path, targets, options):
    world = AdapterWorld(tiny_models.make_llama(), backend, tmp_path)
    world.sequence("a", make_lora(world.base, targets, **options))
    check_prompt(world, "a", 40)


@pytest.mark.parametrize("chunk", [1, 7, None])
def test_chunks_make_no_difference(backend, tmp_path, chunk):
    world = AdapterWorld(tiny_models.make_llama(), backend, tmp_path)
    world.sequence("a", make_lora(world.base, ["embed_tokens", "lm_head", *ATTENTION, *FEED_FORWARD]))
    check_prompt(world, "a", 30, chunk)


def test_ranks_and_both_scales_in_one_batch_with_the_base_model(backend, tmp_path):
    """cases.md I: r 4 and r 16, use_rslora on and off; base rows between them."""
    world = AdapterWorld(tiny_models.make_llama(), backend, tmp_path)
    names = {
        "r4": {"r": 4, "seed": 1},
        "base": None,
        "r16 rslora": {"r": 16, "rslora": True, "seed": 2},
        "r16": {"r": 16, "seed": 3},
        "base too": None,
        "r4 rslora": {"r": 4, "rslora": True, "seed": 4},
    }
    prompts = {}
    for i, (name, options) in enumerate(names.items()):
        targets = [*ATTENTION, *FEED_FORWARD][: 2 + i]
        world.sequence(name, None if options is None else make_lora(world.base, targets, **options))
        prompts[name] = tiny_models.random_prompt(199, 5 + 3 * i, seed=i)
    tokens = {name: list(prompt) for name, prompt in prompts.items()}
    batch = list(prompts.items())
    for step in range(8):
        for (name, _), logits in zip(batch, world.runner.step(batch), strict=True):
            assert world.error(name, logits, tokens[name]) < TOLERANCE, (step, name)
            tokens[name].append(int(logits[-1].argmax()))
        batch = [(name, tokens[name][-1:]) for name in names]
    for name, prompt in prompts.items():
        assert tokens[name] == [*prompt, *world.greedy(name, prompt, 8)]


def test_rows_of_the_base_model_have_the_same_bits_beside_adapters_and_without(backend, tmp_path):
    world = AdapterWorld(tiny_models.make_llama(), backend, tmp_path)
    prompt = tiny_models.random_prompt(199, 12)
    alone = world.runner.prompt("alone", prompt)
    world.sequence("a", make_lora(world.base, [*ATTENTION, *FEED_FORWARD, "embed_tokens", "lm_head"]))
    beside = world.runner.step([("a", prompt), ("base", prompt)])[1]
    assert torch.equal(alone, beside)


def test_a_tied_head_takes_an_adapter_of_its_own(backend, tmp_path):
    """PEFT runs an adapter of a tied layer beside it, and does not tie the adapter: only the named one changes."""
    import peft

    model = tiny_models.make_llama(tie_word_embeddings=True)
    for target in ("lm_head", "embed_tokens"):
        world = AdapterWorld(model, backend, tmp_path / target)
        lora = make_lora(model, [target])
        world.sequence("a", lora)
        prompt = tiny_models.random_prompt(199, 20)
        found = world.runner.prompt("a", prompt)
        wrapped = peft.PeftModel.from_pretrained(
            tiny_models.make_llama(tie_word_embeddings=True), tmp_path / target / "a"
        )
        expected = tiny_models.logits_of(wrapped.eval(), prompt)
        assert ((found - expected).abs().max() / expected.std()).item() < TOLERANCE


@pytest.mark.parametrize("targets", [[*ATTENTION, *FEED_FORWARD], ["embed_tokens"]], ids=["products", "embedding"])
def test_gemma3_whose_embedding_is_scaled_and_whose_windows_vary(backend, tmp_path, targets):
    """Against PEFT itself, which scales the embedding's adapter as the model does its rows."""
    import peft

    world = AdapterWorld(tiny_models.make_gemma3(), backend, tmp_path)
    lora = make_lora(world.base, targets, r=5)
    world.sequence("a", lora)
    prompt = tiny_models.random_prompt(211, 40)
    found = world.runner.prompt("a", prompt)
    wrapped = peft.PeftModel.from_pretrained(tiny_models.make_gemma3(), tmp_path / "a")
    expected = tiny_models.logits_of(wrapped.eval(), prompt)
    assert ((found - expected).abs().max() / expected.std()).item() < TOLERANCE


@pytest.mark.parametrize("rslora", [False, True])
def test_what_peft_writes_runs_as_peft_runs_it(backend, tmp_path, rslora):
    """all-linear, patterns, an embedding: PEFT makes, saves and runs it; the file repeats the base embedding."""
    import peft

    torch.manual_seed(5)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, use_rslora=rslora, init_lora_weights=False,
        target_modules=["embed_tokens", "lm_head", *ATTENTION, *FEED_FORWARD], exclude_modules=["v_proj"],
        rank_pattern={"q_proj": 2, r"layers\.[02]\.mlp\..*": 5}, alpha_pattern={"up_proj": 1},
    )  # fmt: skip
    wrapped = peft.get_peft_model(tiny_models.make_llama(), config).eval()
    wrapped.save_pretrained(tmp_path / "peft")
    world = AdapterWorld(tiny_models.make_llama(), backend, tmp_path)
    facts = world.slots.load(str(tmp_path / "peft"))
    assert (facts.rank, facts.num_layers) == (5, 2 + 6 * 3)
    world.runner.slot_of["a"] = world.slots.acquire(facts.adapter_id)
    prompt = tiny_models.random_prompt(199, 25)
    expected = tiny_models.logits_of(wrapped, prompt)
    found = world.runner.prompt("a", prompt)
    assert ((found - expected).abs().max() / expected.std()).item() < TOLERANCE
