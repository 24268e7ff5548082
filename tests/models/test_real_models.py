"""The two real models, read from GGUF, against Hugging Face in fp32 on the same dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig
from octavo.core.base.errors import ModelNotFound
from octavo.core.load.checkpoint import Checkpoint, open_checkpoint
from octavo.core.load.resolve import resolve_model
from tests.models.step_runner import StepRunner, load_model, relative_error

TOLERANCE = 1e-4
SMOLLM2_PROMPT = [504, 3575, 282, 4649, 314, 260, 1158, 327, 253, 5345, 284, 30]
GEMMA_PROMPT = [2, 818, 5279, 529, 7001, 563, 496, 3207, 532, 506, 1902, 236761]


@pytest.fixture
def cpu() -> Iterator[CpuBackend]:
    backend = CpuBackend(BackendConfig(num_threads=2))
    yield backend
    backend.close()


def opened(name: str) -> Checkpoint:
    try:
        return open_checkpoint(resolve_model(name))
    except ModelNotFound as error:
        pytest.skip(str(error))


def hugging_face(checkpoint: Checkpoint) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    path = checkpoint.path
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def last_logits(model: torch.nn.Module, token_ids: list[int], keep: int) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids]), logits_to_keep=keep).logits[0]
    return logits


@pytest.mark.timeout(300)
def test_smollm2_logits(cpu):
    checkpoint = opened("smollm2")
    model, opset = load_model(checkpoint, cpu, block_size=16)
    runner = StepRunner(model, cpu, opset)
    expected = last_logits(hugging_face(checkpoint), SMOLLM2_PROMPT, len(SMOLLM2_PROMPT))
    assert relative_error(runner.prompt("whole", SMOLLM2_PROMPT), expected) < TOLERANCE
    assert relative_error(runner.prompt("chunks", SMOLLM2_PROMPT, 5), expected) < TOLERANCE


@pytest.mark.parity
@pytest.mark.timeout(600)
def test_gemma3_logits_short_and_beyond_the_window(cpu):
    checkpoint = opened("gemma3-270m")
    model, opset = load_model(checkpoint, cpu, block_size=16, max_num_batched_tokens=1500, max_model_len=1500)
    runner = StepRunner(model, cpu, opset, num_blocks=800)
    reference = hugging_face(checkpoint)
    expected = last_logits(reference, GEMMA_PROMPT, len(GEMMA_PROMPT))
    assert relative_error(runner.prompt("short", GEMMA_PROMPT), expected) < TOLERANCE

    generator = torch.Generator().manual_seed(0)
    long_prompt = [2, *torch.randint(1000, 200_000, (1499,), generator=generator).tolist()]
    expected = last_logits(reference, long_prompt, 8)
    for chunk in (None, 40, 512, 700):
        found = runner.prompt(f"long-{chunk}", long_prompt, chunk, keep=8)
        assert relative_error(found[-8:], expected) < TOLERANCE, chunk
        runner.finish(f"long-{chunk}")
