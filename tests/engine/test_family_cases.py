"""Inputs of real families that broke real engines: latent attention in chunks and from the cache, sinks in a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error

TOLERANCE = 1e-4


def saved(model: torch.nn.Module, directory: Path) -> str:
    return str(tiny_models.save(model, directory))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_in_chunks_and_from_the_cache(family: str, tmp_path: Path) -> None:
    """vllm#26042: results went wrong with chunked prefill, and the more so the smaller the chunks."""
    model = FAMILIES[family].make()
    prompt = tiny_models.random_prompt(199, 200)
    expected = tiny_models.logits_of(model, prompt).log_softmax(-1)
    directory = saved(model, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0)
    greedy = tiny_models.greedy(model, prompt, 12)
    for chunk in (8, 16, 64, 256):
        with LLM(directory, block_size=16, max_num_batched_tokens=chunk, max_num_seqs=2, num_kv_blocks=60) as llm:
            cold = llm.generate([prompt], params)[0]
            scores = [
                position[token].logprob for position, token in zip(cold.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
            wanted = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert relative_error(torch.tensor(scores), wanted) < TOLERANCE, chunk
            hot = llm.generate([prompt[:64] + prompt[100:]], SamplingParams(temperature=0.0, max_tokens=12))[0]
            assert (cold.outputs[0].token_ids, hot.num_cached_tokens) == (greedy, 64)
            assert hot.outputs[0].token_ids == tiny_models.greedy(model, prompt[:64] + prompt[100:], 12)


def test_sinks_count_in_a_batch_as_they_do_alone(tmp_path: Path) -> None:
    """sglang#30050: sinks were dropped in batched decode, and short prompts hid it."""
    model = FAMILIES["gpt_oss"].make(sliding_window=8)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(2.0, 4.0, len(parameter)))  # as large as the largest scores
    backend = ReferenceBackend()
    checkpoint = open_checkpoint(ModelSource("tiny", Path(saved(model, tmp_path)), "safetensors"))
    loaded, opset = load_model(checkpoint, backend)
    checkpoint.close()
    runner = StepRunner(loaded, backend, opset)
    texts = {str(length): tiny_models.random_prompt(199, length) for length in (3, 9, 30)}
    logits = runner.step(list(texts.items()), keep=1)
    for _ in range(20):
        for (name, text), row in zip(texts.items(), logits, strict=True):
            assert relative_error(row[0], tiny_models.logits_of(model, text)[-1]) < TOLERANCE, (name, len(text))
            text.append(int(row[0].argmax()))
        logits = runner.step([(name, text[-1:]) for name, text in texts.items()])
    for name, text in texts.items():
        alone = runner.greedy(f"alone-{name}", text[: int(name)], 20)
        assert alone == text[int(name) :]
