"""Each vendor's own kernels, interpreted, in recorded steps of an engine: addresses and order, not numbers alone."""

from __future__ import annotations

import importlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.backends.common.tuning import TuningTable
from tests.fakes import late_backend, tiny_models
from tests.fakes.late_device import LateDevice

VENDORS = ("cuda", "rocm")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [tiny_models.random_prompt(199, length, seed=length) for length in (1, 3)]
SIZES: dict[str, Any] = {
    "progress": False, "num_kv_blocks": 50, "block_size": 16, "max_num_seqs": 2, "max_model_len": 64,
    "max_num_batched_tokens": 32,
}  # fmt: skip


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendors_kernels_replayed_give_the_tokens_of_the_cpu(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"octavo.backends.{vendor}"
    chip = importlib.import_module(f"{package}.chips").DEFAULT
    make_ops = importlib.import_module(f"{package}.ops").make_ops
    folder = tiny_models.save(tiny_models.make_llama(num_hidden_layers=1), tmp_path)
    with LLM(str(folder), **SIZES, backend="cpu", num_threads=1) as llm:
        expected = [list(reply.outputs[0].token_ids) for reply in llm.generate(PROMPTS, GREEDY)]
    tuning = TuningTable.load(files(package) / "tuning")
    with LateDevice() as device:
        late_backend.register(monkeypatch, device, make_ops, chip=chip, tuning=tuning)
        with LLM(str(folder), **SIZES, backend="late", dtype="float32") as llm:
            found = [list(reply.outputs[0].token_ids) for reply in llm.generate(PROMPTS, GREEDY)]
            own = {choice.op for choice in llm.op_choices() if choice.implementation == "own"}
    assert found == expected
    assert sum(recording.replays for recording in device.recordings) >= GREEDY.max_tokens - 2
    assert not any(recording.memory for recording in device.recordings)  # no op allocates
    assert own >= {"gemm", "embed", "rms_norm", "rope_write_kv", "paged_attention", "sample"}
