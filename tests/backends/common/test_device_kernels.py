"""Each vendor's own kernels, interpreted, in recorded steps of an engine: addresses and order, not numbers alone."""

from __future__ import annotations

import importlib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.backends.common.tuning import TuningTable
from octavo.conformance import suite
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import InProcess
from octavo.core.backend import BackendConfig
from tests.fakes import late_backend, tiny_models
from tests.fakes.late_backend import LateBackend
from tests.fakes.late_device import LateDevice

VENDORS = ("cuda", "rocm")
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [tiny_models.random_prompt(199, length, seed=length) for length in (1, 3)]
SIZES: dict[str, Any] = {
    "progress": False, "num_kv_blocks": 50, "block_size": 16, "max_num_seqs": 2, "max_model_len": 64,
    "max_num_batched_tokens": 32,
}  # fmt: skip


def parts_of(vendor: str) -> dict[str, Any]:
    """What LateBackend takes of a vendor: its ops, its default chip, its launch parameters."""
    package = f"octavo.backends.{vendor}"
    return {
        "make_ops": importlib.import_module(f"{package}.ops").make_ops,
        "chip": importlib.import_module(f"{package}.chips").DEFAULT,
        "tuning": TuningTable.load(files(package) / "tuning"),
    }


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendors_kernels_replayed_give_the_tokens_of_the_cpu(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_models.save(tiny_models.make_llama(num_hidden_layers=1), tmp_path)
    with LLM(str(folder), **SIZES, backend="cpu", num_threads=1) as llm:
        expected = [list(reply.outputs[0].token_ids) for reply in llm.generate(PROMPTS, GREEDY)]
    with LateDevice() as device:
        late_backend.register(monkeypatch, device, **parts_of(vendor))
        with LLM(str(folder), **SIZES, backend="late", dtype="float32") as llm:
            found = [list(reply.outputs[0].token_ids) for reply in llm.generate(PROMPTS, GREEDY)]
            own = {choice.op for choice in llm.op_choices() if choice.implementation == "own"}
    assert found == expected
    assert sum(recording.replays for recording in device.recordings) >= GREEDY.max_tokens - 2
    assert not any(recording.memory for recording in device.recordings)  # no op allocates
    assert own >= {"gemm", "embed", "rms_norm", "rope_write_kv", "paged_attention", "sample"}


@pytest.mark.parametrize("window", ["", "-w17"])
@pytest.mark.parametrize("vendor", VENDORS)
def test_a_vendors_attention_bakes_nothing_of_a_batch_into_a_recording(vendor: str, window: str) -> None:
    """The suite's case: one program over other lengths, fewer requests, padding, and the first batch once more."""
    case = suite.families()[f"program/bfloat16-h4k2d64{window}"]
    with LateDevice() as device:
        runner = InProcess(LateBackend(BackendConfig(), device, **parts_of(vendor)))
        result = runner.run(case, seed=5)
        runner.close()
    assert result.status is Status.PASS, result.detail
    assert result.implementation == "own"
    assert sum(recording.replays for recording in device.recordings) == 2 * 3  # it runs twice, four steps each
