"""Each vendor's own kernels, interpreted, in recorded steps of an engine: addresses and order, not numbers alone."""

from __future__ import annotations

import importlib
import itertools
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends.common.tuning import TuningTable
from octavo.conformance import suite
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import InProcess
from octavo.core.backend import AttentionMetadata, BackendConfig, KVCache, KVCacheSpec, KVLayout, StepBuffers
from octavo.core.backend.ops import StepPlan
from octavo.core.backend.reference import attention as reference
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


@pytest.mark.parametrize("vendor", VENDORS)
def test_steps_of_one_shape_and_of_other_requests_have_recordings_of_their_own(vendor: str) -> None:
    """Sixteen requests that decode, then a prompt of sixteen tokens: one padded shape, and tiles of either kind."""
    shape = {"num_requests": 16, "num_tokens": 16}
    with LateDevice() as device:
        backend = LateBackend(BackendConfig(), device, **parts_of(vendor))
        memory = AttentionStep(backend, **shape)
        program = backend.compile(memory.run, 16, memory.buffers([1] * 16))
        for queries in ([1] * 16, [1] * 16, [16], [1] * 12, [15], [1] * 16):
            buffers = memory.buffers(queries)
            program.run(buffers)
            found = backend.to_host(memory.out)[: sum(queries)]
            torch.testing.assert_close(found.double(), memory.expected(queries), rtol=0, atol=2e-2)
        assert [recording.replays for recording in device.recordings] == [3, 2]
        backend.close()


class AttentionStep:
    """A step that is one attention over a cache; request b has 20 + b keys in blocks of its own."""

    def __init__(self, backend: LateBackend, num_requests: int, num_tokens: int) -> None:
        self._backend, self._num_requests, self._num_tokens = backend, num_requests, num_tokens
        spec = KVCacheSpec(2, 32, 32, torch.bfloat16, 16)
        self._host = [torch.randn(shape).bfloat16() for shape in ((num_tokens, 4, 32), (3 * num_requests, 16, 2, 32))]
        q, kv = (backend.from_host(x) for x in self._host)
        self._q, self.out = q, backend.empty(*q.shape, dtype=q.dtype)
        self._cache = KVCache(spec, KVLayout.NHD, 3 * num_requests, kv, kv)
        self._logits = backend.empty(1, 1, dtype=torch.float32)
        self._ids = backend.from_host(torch.zeros(num_tokens, dtype=torch.int64))

    def run(self, buffers: StepBuffers) -> None:
        self._backend.ops.paged_attention(self._q, self._cache, buffers.plans[0], out=self.out, softmax_scale=0.2)

    def meta(self, queries: list[int]) -> AttentionMetadata:
        """On the host."""
        padding = self._num_requests - len(queries)
        lengths = [20 + b for b in range(len(queries))]
        return AttentionMetadata(
            num_requests=len(queries),
            num_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(lengths),
            query_start_loc=torch.tensor(
                [0, *itertools.accumulate(queries), *[sum(queries)] * padding], dtype=torch.int32
            ),
            seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
            block_table=torch.arange(3 * self._num_requests, dtype=torch.int32).view(-1, 3),
            slot_mapping=torch.full((self._num_tokens,), -1),
            block_size=16,
        )

    def buffers(self, queries: list[int]) -> StepBuffers:
        meta = self.meta(queries)
        names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        sent = replace(meta, **{name: self._backend.from_host(getattr(meta, name)) for name in names})
        plans = (self._backend.ops.plan(sent),)
        return StepBuffers(self._ids, self._ids, plans, self._ids, self._logits)

    def expected(self, queries: list[int]) -> torch.Tensor:
        """The reference in float64."""
        q, kv = (x.double() for x in self._host)
        cache, out = replace(self._cache, key_NSKD=kv, value_NSKD=kv), torch.zeros_like(q)
        reference.paged_attention(q, cache, StepPlan(self.meta(queries)), out=out, softmax_scale=0.2)
        return out[: sum(queries)]
