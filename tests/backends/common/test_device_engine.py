"""Whole engines over a device whose work runs late: padded steps, recordings, memory and order, without a GPU."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.backends.common import graphs
from octavo.backends.common.gpu import Gpu
from octavo.backends.common.op_groups import OpGroups
from octavo.conformance import suite
from octavo.conformance.harness.result import Status
from octavo.conformance.harness.worker import InProcess
from octavo.core.backend import AttentionMetadata, BackendConfig, StepPlan
from octavo.core.base.errors import ConfigError
from tests.fakes import late_backend, tiny_models
from tests.fakes.late_backend import LateBackend, MakeOps, StaticOps, bare_ops, static_ops
from tests.fakes.late_device import LateDevice

GREEDY = SamplingParams(max_tokens=7, temperature=0.0, ignore_eos=True)
PROMPTS = [tiny_models.random_prompt(199, length, seed=length) for length in (1, 5, 30)]
SIZES: dict[str, Any] = {
    "progress": False, "num_kv_blocks": 120, "block_size": 4, "max_num_seqs": 8, "max_model_len": 64,
    "max_num_batched_tokens": 64,
}  # fmt: skip
PROGRAM = "program/float32-h4k2-d64"


@dataclass
class Engines:
    """One tiny model, and engines over it."""

    folder: Path
    device: LateDevice
    monkeypatch: pytest.MonkeyPatch

    def late(self, make_ops: MakeOps = static_ops, **options: Any) -> LLM:
        with self.monkeypatch.context() as monkeypatch:
            late_backend.register(monkeypatch, self.device, make_ops)
            return self._late(options)

    def _late(self, options: dict[str, Any]) -> LLM:
        types = {"dtype": "float32", "kv_cache_dtype": "float32"}
        return LLM(str(self.folder), **(SIZES | types | {"backend": "late"} | options))

    def expected(self, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
        with LLM(str(self.folder), **SIZES | {"backend": "cpu", "num_threads": 1}) as llm:
            return tokens(llm, prompts, params)


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(reply.outputs[0].token_ids) for reply in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.make_llama(num_hidden_layers=2), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with LateDevice() as device:
        yield Engines(folder, device, monkeypatch)
    torch.set_num_threads(before)


def test_recorded_steps_give_the_tokens_of_the_cpu(engines: Engines) -> None:
    """Requests of other lengths and fewer of them meet the recordings of those before."""
    more = [tiny_models.random_prompt(199, length, seed=50 + length) for length in (12, 2)]
    with engines.late() as llm:
        found = [tokens(llm), tokens(llm, more), tokens(llm)]
    recordings = engines.device.recordings
    assert recordings
    assert sum(r.replays for r in recordings) >= 3 * (GREEDY.max_tokens - 2)
    assert found == [engines.expected(), engines.expected(more), engines.expected()]


def test_requests_that_end_one_by_one_leave_only_padding(engines: Engines) -> None:
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (3, 12, 7)]
    with engines.late() as llm:
        found = [[list(r.outputs[0].token_ids) for r in llm.generate(PROMPTS, params)] for _ in range(2)]
    with LLM(str(engines.folder), **SIZES | {"backend": "cpu", "num_threads": 1}) as llm:
        expected = [list(r.outputs[0].token_ids) for r in llm.generate(PROMPTS, params)]
    assert found == [expected, expected]
    assert len(engines.device.recordings) >= 2  # of 4 tokens, 2 and 1


def test_ops_that_read_back_fall_back_to_plain_steps_with_one_line(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger=graphs.__name__), engines.late(bare_ops) as llm:
        found = [tokens(llm), tokens(llm)]
    assert found == [engines.expected()] * 2
    assert not engines.device.recordings
    lines = [record.message for record in caplog.records if record.name == graphs.__name__]
    assert len(lines) == 1  # though steps of several shapes were tried
    assert "is not permitted while a stream is recorded" in lines[0]


def test_a_device_that_refuses_to_record_still_answers(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    engines.device.refuses_recording = "operation not permitted when stream is capturing"
    with caplog.at_level(logging.WARNING, logger=graphs.__name__), engines.late() as llm:
        assert tokens(llm) == engines.expected()
    assert "RuntimeError: operation not permitted when stream is capturing" in caplog.text


def test_without_graphs_nothing_is_recorded(engines: Engines) -> None:
    with engines.late(backend_options={"graphs": "off"}) as llm:
        assert tokens(llm) == engines.expected()
    assert not engines.device.recordings


def test_two_engines_take_turns_on_one_device(engines: Engines) -> None:
    with engines.late() as first, engines.late() as second:
        found = [tokens(llm) for llm in (first, second, first, second)]
    assert found == [engines.expected()] * 4
    assert len(engines.device.recordings) >= 2


def test_closing_gives_everything_back(engines: Engines) -> None:
    with engines.late() as llm:
        tokens(llm)
        assert engines.device.live_bytes > 0
    engines.device.recordings.clear()
    gc.collect()
    assert engines.device.live_bytes == 0


def test_too_many_blocks_are_refused_before_anything_runs(engines: Engines) -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        engines.late(num_kv_blocks=10_000_000)
    gc.collect()
    assert engines.device.live_bytes == 0


def test_scored_prompts_are_the_cpus(engines: Engines) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1, logprobs=2)
    with engines.late() as llm:
        found = [llm.generate(PROMPTS, params) for _ in range(4)][-1]
    # Only the decoding step: scores are written to room that comes and goes with a step.
    assert len(engines.device.recordings) == 1
    with LLM(str(engines.folder), **SIZES | {"backend": "cpu", "num_threads": 1}) as llm:
        expected = llm.generate(PROMPTS, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        pairs = zip(ours.prompt_logprobs or [], theirs.prompt_logprobs or [], strict=True)
        for mine, other in itertools.islice(pairs, 1, None):
            assert mine is not None
            assert other is not None
            assert {k: v.logprob for k, v in mine.items()} == pytest.approx(
                {k: v.logprob for k, v in other.items()}, abs=1e-4
            )


# -- what a recording may hold --------------------------------------------------------------------------------


def conform_program(make_ops: MakeOps) -> tuple[Status, str, LateDevice]:
    """The suite's case of one program replayed over other lengths, fewer requests and padding."""
    name = next(name for name in suite.families() if name.startswith("program/float32"))
    with LateDevice() as device:
        runner = InProcess(LateBackend(BackendConfig(), device, make_ops))
        result = runner.run(suite.families()[name], seed=3)
        runner.close()
    return result.status, result.detail, device


def test_the_suites_program_case_holds_on_recordings() -> None:
    status, detail, device = conform_program(static_ops)
    assert status is Status.PASS, detail
    assert [r.replays for r in device.recordings] == [3, 3]  # the case runs twice, and the first of four runs is plain


class StaleOps(StaticOps):
    """Keeps the lengths of the step that it was first planned for, as a kernel that bakes them in does."""

    def __init__(self) -> None:
        self._lengths: torch.Tensor | None = None

    def paged_attention(self, q_THD: torch.Tensor, kv: Any, plan: StepPlan, **rest: Any) -> None:
        if self._lengths is None:
            self._lengths = plan.meta.seq_lens.clone()
        meta = AttentionMetadata(
            0, 0, 0, 0, plan.meta.query_start_loc, self._lengths, plan.meta.block_table, plan.meta.slot_mapping, 16
        )
        super().paged_attention(q_THD, kv, StepPlan(meta), **rest)


def test_a_length_that_is_baked_in_is_caught() -> None:
    assert conform_program(groups(StaleOps))[0] is Status.FAIL


class CountingOps(StaticOps):
    """Decides by a count of the batch inside the op, which a recording would fix."""

    def paged_attention(self, q_THD: torch.Tensor, kv: Any, plan: StepPlan, **rest: Any) -> None:
        assert plan.meta.max_seq_len > 0
        super().paged_attention(q_THD, kv, plan, **rest)


def test_an_op_that_decides_by_a_count_is_not_recorded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=graphs.__name__):
        status, detail, device = conform_program(groups(CountingOps))
    assert status is Status.PASS, detail
    assert not device.recordings
    assert "the step reads max_seq_len of its metadata, which varies from step to step" in caplog.text


@dataclass(slots=True)
class SplitPlan(StepPlan):
    splits: int
    room: torch.Tensor


class PlanningOps(StaticOps):
    """Splits by the longest request, in a workspace that stays, or that moves with every plan."""

    moves = False

    def __init__(self) -> None:
        self._room = torch.zeros(4, device="cpu:0")
        self.rooms: list[torch.Tensor] = []

    def plan(self, meta: AttentionMetadata) -> StepPlan:
        if self.moves:
            self._room = torch.zeros(4, device="cpu:0")
            self.rooms.append(self._room)  # still there, so that none takes the place of another
        return SplitPlan(meta, 2 if meta.max_seq_len > 32 else 1, self._room)


class MovingOps(PlanningOps):
    moves = True


def test_a_choice_of_the_plan_has_a_recording_of_its_own() -> None:
    status, detail, device = conform_program(groups(PlanningOps))
    assert status is Status.PASS, detail
    assert [r.replays for r in device.recordings] == [2, 1] * 2  # longest 48: 2 splits, then 2: 1, then 34: 2 again


def test_plans_that_always_move_are_given_up(engines: Engines, caplog: pytest.LogCaptureFixture) -> None:
    long = SamplingParams(max_tokens=graphs.MOST_ATTEMPTS + 4, temperature=0.0, ignore_eos=True)
    with caplog.at_level(logging.WARNING, logger=graphs.__name__), engines.late(groups(MovingOps)) as llm:
        assert tokens(llm, [[5, 6]], long) == engines.expected([[5, 6]], long)
    assert len(engines.device.recordings) == graphs.MOST_ATTEMPTS
    assert f"their plans differed {graphs.MOST_ATTEMPTS} times" in caplog.text


def groups(kind: type[StaticOps]) -> MakeOps:
    def make(gpu: Gpu) -> OpGroups:
        ops = OpGroups(f"late on {gpu.device}")
        ops.take(kind(), ops=("paged_attention", "write_kv"), besides=("plan",))
        return ops

    return make
