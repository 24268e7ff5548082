"""Logits and greedy tokens of tiny random models equal Hugging Face's, whatever the chunks and the batch."""

from __future__ import annotations

import pytest
import torch

from tests.fakes import tiny_models
from tests.models.step_runner import relative_error

TOLERANCE = 1e-4
CHUNKS = (4, 8, 9, 16, 40)
LONG = 200

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LLAMAS = {
    "grouped-heads": {},
    "one-head-per-kv-head": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "one-kv-head-odd-head-dim": {"num_key_value_heads": 1, "head_dim": 20},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope-theta": {"rope_theta": 500.0},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    # Enough frequencies that some lie in the blended band.
    "rope-llama3": {"head_dim": 32, "rope_theta": 1000.0, "rope_scaling": LLAMA3_ROPE},
    "gelu": {"hidden_act": "gelu"},
}
GEMMAS = {
    "window": {},
    "default-pattern": {"num_hidden_layers": 7, "layer_types": None},
    "heads-untied": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "softcaps": {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "biases": {"attention_bias": True},
    "rope-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "no-window": {"layer_types": ["full_attention"] * 4},
}
CASES = [
    pytest.param(family, case, id=f"{family}-{case}")
    for family, cases in (("llama", LLAMAS), ("gemma3", GEMMAS))
    for case in cases
]


def make(family: str, case: str) -> torch.nn.Module:
    if family == "llama":
        return tiny_models.make_llama(**LLAMAS[case])
    return tiny_models.make_gemma3(**GEMMAS[case])


@pytest.fixture
def gemma_softcap(monkeypatch):
    """Hugging Face's Gemma 3 reads attn_logit_softcapping and forgets to pass it on; pass it on."""
    from transformers.models.gemma3 import modeling_gemma3

    eager = modeling_gemma3.eager_attention_forward

    def with_softcap(module, *args, **kwargs):
        return eager(module, *args, softcap=module.attn_logit_softcapping, **kwargs)

    monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", with_softcap)


@pytest.mark.usefixtures("gemma_softcap")
@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_and_greedy_tokens_equal_hugging_face(family, case, runner_of):
    model = make(family, case)
    runner = runner_of(model)
    for length in (1, 17, LONG):
        prompt = tiny_models.random_prompt(model.config.vocab_size, length)
        expected = tiny_models.logits_of(model, prompt)
        assert relative_error(runner.prompt(f"whole-{length}", prompt), expected) < TOLERANCE
        runner.finish(f"whole-{length}")
    for chunk in CHUNKS:
        assert relative_error(runner.prompt(f"chunk-{chunk}", prompt, chunk), expected) < TOLERANCE, chunk
        runner.finish(f"chunk-{chunk}")
    prompt = tiny_models.random_prompt(model.config.vocab_size, 17)
    assert runner.greedy("greedy", prompt, 24, chunk=9) == tiny_models.greedy(model, prompt, 24)


@pytest.mark.parametrize(("family", "case"), [("llama", "grouped-heads"), ("gemma3", "window")])
def test_ragged_batch_gives_each_sequence_its_own_logits(family, case, runner_of):
    model = make(family, case)
    runner = runner_of(model)
    prompts = {str(length): tiny_models.random_prompt(model.config.vocab_size, length) for length in (30, 1, 75, 40)}
    chunks = {"30": 1, "1": 1, "75": 32, "40": 7}  # decode, a single token, long chunks and short ones in one step
    found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    done = dict.fromkeys(prompts, 0)
    while any(done[name] < len(prompts[name]) for name in prompts):
        waiting = [name for name in prompts if done[name] < len(prompts[name])]
        batch = [(name, prompts[name][done[name] : done[name] + chunks[name]]) for name in waiting]
        for (name, tokens), logits in zip(batch, runner.step(batch), strict=True):
            found[name].append(logits)
            done[name] += len(tokens)
    for name, prompt in prompts.items():
        assert relative_error(torch.cat(found[name]), tiny_models.logits_of(model, prompt)) < TOLERANCE, name


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_logits_only_of_the_rows_asked_for(family, runner_of):
    model = make(family, "grouped-heads" if family == "llama" else "window")
    runner = runner_of(model)
    prompts = [tiny_models.random_prompt(model.config.vocab_size, length) for length in (5, 12)]
    batch = [(str(len(prompt)), prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, runner.step(batch, keep=2), strict=True):
        assert logits.shape == (2, model.config.vocab_size)
        assert relative_error(logits, tiny_models.logits_of(model, prompt)[-2:]) < TOLERANCE
    nothing = runner.step([("more", prompts[0])], keep=0)
    assert nothing[0].shape == (0, model.config.vocab_size)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_stored_in_bf16_are_the_only_thing_rounded(family, runner_of):
    model = make(family, "biases")
    runner = runner_of(model, dtype=torch.bfloat16)
    prompt = tiny_models.random_prompt(model.config.vocab_size, 40)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # products and embeddings; norms and biases stay in fp32
                parameter.copy_(parameter.to(torch.bfloat16))
    assert relative_error(runner.prompt("a", prompt), tiny_models.logits_of(model, prompt)) < TOLERANCE


def test_longest_step_and_last_position_fit(runner_of):
    model = make("llama", "grouped-heads")
    runner = runner_of(model, max_num_batched_tokens=64, max_model_len=100)
    prompt = tiny_models.random_prompt(model.config.vocab_size, 100)
    assert relative_error(runner.prompt("a", prompt, 64), tiny_models.logits_of(model, prompt)) < TOLERANCE
