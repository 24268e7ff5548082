"""Devices that take only a few shapes: every step is padded to one of them, and no token changes for it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.backend import Capabilities, PlainProgram, StepBuffers
from octavo.core.base.errors import ConfigError
from octavo.core.base.params import SamplingParams
from tests.engine.worlds import NullWorld, TinyModels
from tests.fakes import tiny_models
from tests.fakes.null_model import continuation

BUCKETS = "4,16,48"
PROMPTS = [[5], [1, 2, 3], list(range(40)), [9] * 17, [7, 8]]


def shapes_of(buffers: StepBuffers) -> tuple[int, ...]:
    meta = buffers.plans[0].meta
    return (
        len(buffers.token_ids_T), len(buffers.positions_T), len(meta.slot_mapping), len(buffers.logit_rows_R),
        len(buffers.logits_RV), len(meta.seq_lens), len(meta.query_start_loc), *meta.block_table.shape,
    )  # fmt: skip


class Recorded:
    """A program that takes exactly the shapes it was compiled for."""

    def __init__(self, program: PlainProgram, shapes: tuple[int, ...]) -> None:
        self._program, self._shapes = program, shapes

    def run(self, buffers: StepBuffers) -> None:
        assert shapes_of(buffers) == self._shapes
        self._program.run(buffers)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, null: NullWorld) -> list[tuple[int | None, tuple[int, ...]]]:
    """(bucket, shapes) of each program of the Null backend, which refuse all other shapes."""
    made: list[tuple[int | None, tuple[int, ...]]] = []

    def compile_(self: Any, step: Any, bucket: int | None, buffers: StepBuffers) -> Any:
        made.append((bucket, shapes_of(buffers)))
        return Recorded(PlainProgram(step), made[-1][1])

    monkeypatch.setattr("tests.fakes.null_backend.NullBackend.compile", compile_)
    return made


def test_steps_have_the_shapes_of_buckets_and_tokens_do_not_change(
    null: NullWorld, compiled: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    options = {"backend_options": {"token_buckets": BUCKETS}, "max_num_seqs": 8, "max_model_len": 128}
    with null.llm({"windows": [None, 8]}, num_kv_blocks=200, **options) as llm:
        replies = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert list(reply.outputs[0].token_ids) == continuation(prompt, 12, 97)
    assert {bucket for bucket, _ in compiled} <= {4, 16, 48}
    assert len(compiled) == len(set(compiled)) <= 3  # each bucket once
    for bucket, shapes in compiled:
        rows = min(bucket or 0, 8)
        assert shapes == (bucket, bucket, bucket, rows, rows, rows, rows + 1, rows, 128 // 16)


def test_scored_prompts_have_one_more_shape_a_bucket(
    null: NullWorld, compiled: list[tuple[int | None, tuple[int, ...]]]
) -> None:
    options = {"backend_options": {"token_buckets": BUCKETS}, "max_num_seqs": 2, "max_model_len": 128}
    with null.llm(num_kv_blocks=200, **options) as llm:
        (reply,) = llm.generate([list(range(30))], SamplingParams(max_tokens=3, prompt_logprobs=1))
    assert reply.prompt_logprobs is not None
    assert len(reply.prompt_logprobs) == 30
    assert {shapes[3] for _, shapes in compiled} == {2, 48}


def test_a_step_is_never_larger_than_the_last_bucket(null: NullWorld, caplog: pytest.LogCaptureFixture) -> None:
    options = {"backend_options": {"token_buckets": BUCKETS}, "max_model_len": 128, "num_kv_blocks": 300}
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 64, but the device's largest step has 48"):
        null.llm(max_num_seqs=8, max_num_batched_tokens=64, **options)
    with caplog.at_level(logging.WARNING), null.llm(max_num_seqs=64, **options) as llm:
        assert len(llm.generate([[1]] * 60, SamplingParams(max_tokens=2))) == 60
    assert "max_num_seqs is lowered from 64 to 48" in caplog.text


def test_a_real_models_tokens_are_the_same_in_padded_steps(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tiny_models.random_prompt(199, length, seed=length) for length in (1, 5, 30)]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    with tiny.llm("llama") as llm:
        plain = [list(reply.outputs[0].token_ids) for reply in llm.generate(prompts, params)]

    def bucketed(context: Any) -> Capabilities:
        return replace(capabilities(context), dynamic_shapes=False, token_buckets=(4, 16, 64))

    from octavo.backends.cpu import device

    capabilities = device._capabilities
    monkeypatch.setattr(device, "_capabilities", bucketed)
    with tiny.llm("llama") as llm:
        padded = [list(reply.outputs[0].token_ids) for reply in llm.generate(prompts, params)]
    assert padded == plain
