"""Pooling in the engine: the same vectors whatever the company, the chunks and the device's shapes; clear refusals."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.backends.cpu.device import CpuBackend
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError, InvalidRequest, RequestFailed
from octavo.core.base.params import SamplingParams
from octavo.core.base.pooling import PoolingJob
from octavo.core.engine.batch import InputBatch
from octavo.core.engine.llm import LLM
from octavo.core.engine.pooling_stage import PoolingStage
from octavo.core.engine.wire import EngineRequest
from octavo.core.pool.pooler import Pooler
from octavo.core.sched.output import NewRequest, SchedulerOutput
from tests.engine.vectors import OPTIONS, WIDTH, close, pooled, save, texts_of, unit
from tests.engine.worlds import engine_of
from tests.fakes import tiny_encoders
from tests.pool.directories import compact, flags, write_modules


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_chunks_and_company_change_nothing(mode: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    write_modules(save(model, tmp_path), compact(mode, WIDTH), normalize=False)
    texts = texts_of(model)
    found = []
    for tokens in (8, 64, 512):
        with LLM(str(tmp_path), max_num_batched_tokens=tokens, max_num_seqs=4, num_kv_blocks=200, **OPTIONS) as llm:
            found.append([output.outputs.embedding for output in llm.embed(texts)])
            assert [llm.embed(text)[0].outputs.embedding for text in texts] == found[-1]
            assert llm.stats().kv_blocks_used == 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
def test_a_preempted_text_begins_again(mode: str, tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    write_modules(save(model, tmp_path), compact(mode, WIDTH))
    low, high = texts_of(model, (61, 60))
    job = PoolingJob(needs_every_token=mode != "lasttoken", normalize=True)
    options = OPTIONS | {"num_kv_blocks": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    engine = engine_of(EngineConfig(model=str(tmp_path), scheduling_policy="priority", **options))
    found = {}
    try:
        engine.add_request(request("low", low, job, priority=5))
        engine.step()
        engine.step()
        engine.add_request(request("high", high, job, priority=0))  # there is no room for both
        while engine.has_work():
            found |= {output.request_id: output.pooled for output in engine.step()}
            engine.check_integrity()
        assert engine.stats().preemptions == 1
    finally:
        engine.close()
    for name, text in (("low", low), ("high", high)):
        expected = unit(pooled(tiny_encoders.rows_of(model, text), mode))
        close(torch.frombuffer(bytearray(found[name]), dtype=torch.float32).tolist(), expected)


def request(name: str, text: list[int], job: PoolingJob | None, priority: int = 0) -> EngineRequest:
    params = SamplingParams(max_tokens=0)
    return EngineRequest(request_id=name, prompt_token_ids=text, params=params, priority=priority, pooling=job)


def test_the_engine_refuses_what_its_model_does_not_give(tmp_path: Path, null: Any) -> None:
    write_modules(save(tiny_encoders.make_stack("llama"), tmp_path), compact("mean", WIDTH))
    job = PoolingJob(needs_every_token=True)
    for engine, wrong, right in (
        (engine_of(EngineConfig(model=str(tmp_path), **OPTIONS)), None, job),
        (null.engine(), job, None),
    ):
        with pytest.raises(InvalidRequest, match="this model gives"):
            engine.add_request(request("wrong", [5, 6], wrong))
        engine.add_request(request("right", [5, 6], right))
        (output,) = engine.step()
        assert output.finish_reason is not None
        assert (output.pooled is None) is (right is None)
        engine.close()


def test_cache_hits_lose_no_rows(tmp_path: Path) -> None:
    model = tiny_encoders.make_stack("llama")
    text = texts_of(model, (64,))[0]
    for mode, hits in (("mean", False), ("cls", False), ("lasttoken", True)):
        write_modules(save(model, tmp_path / mode), compact(mode, WIDTH))
        with LLM(str(tmp_path / mode), **OPTIONS) as llm:
            first, second, longer = (llm.embed(each)[0] for each in (text, text, [*text, 7, 8]))
            assert first.num_cached_tokens == 0
            assert (second.num_cached_tokens > 0, longer.num_cached_tokens > 0) == (hits, hits)
            assert second.outputs.embedding == first.outputs.embedding
            close(longer.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, [*text, 7, 8]), mode)))


def test_encoders_compute_texts_whole(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    texts = texts_of(model, (90, 17, 60, 96, 3, 80))
    with LLM(str(tmp_path), max_num_batched_tokens=100, max_num_seqs=3, long_prefill_threshold=8, **OPTIONS) as llm:
        for text, output in zip(texts, llm.embed(texts), strict=True):
            close(output.outputs.embedding, unit(tiny_encoders.rows_of(model, text).mean(0)))
        stats = llm.stats()
        assert (stats.kv_blocks_used, stats.kv_blocks_total, stats.preemptions) == (0, 3, 0)
        assert stats.scheduled_tokens == sum(map(len, texts))
        with pytest.raises(InvalidRequest, match="97 tokens, above max_model_len 96"):
            llm.embed([[5] * 97])
    with pytest.raises(ConfigError, match="needs a text whole"):
        LLM(str(tmp_path), max_num_batched_tokens=50, max_num_seqs=3, max_model_len=60, **OPTIONS)
    with LLM(str(tmp_path), max_num_batched_tokens=50, max_num_seqs=3, **OPTIONS) as llm:
        assert llm.max_model_len == 50


@pytest.mark.parametrize("family", ["bert", "llama"])
@pytest.mark.parametrize("mode", ["mean", "lasttoken"])
def test_a_device_of_few_shapes(family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are padded; what pads them reaches no vector."""
    make = CpuBackend.__init__

    def make_with_buckets(backend: CpuBackend, config: Any) -> None:
        make(backend, config)
        backend.capabilities = dataclasses.replace(
            backend.capabilities, dynamic_shapes=False, token_buckets=(4, 16, 64), batch_invariant=False
        )

    monkeypatch.setattr(CpuBackend, "__init__", make_with_buckets)
    model = tiny_encoders.make_encoder(family) if family == "bert" else tiny_encoders.make_stack(family)
    write_modules(save(model, tmp_path), flags(mode, WIDTH))
    texts = texts_of(model, (17, 1, 64, 5, 33, 30, 30))
    with LLM(str(tmp_path), max_num_seqs=4, num_kv_blocks=100, **OPTIONS) as llm:
        assert llm.max_model_len == (64 if family == "bert" else 396)  # whole texts fit the largest step
        for text, output in zip(texts, llm.embed(texts), strict=True):
            close(output.outputs.embedding, unit(pooled(tiny_encoders.rows_of(model, text), mode)))


def test_the_stage_forgets_what_ended() -> None:
    stage = PoolingStage(None, Pooler(task="embed", kind="mean", width=WIDTH), None)  # type: ignore[arg-type]
    batch = InputBatch(2, 8, (4,))
    new = NewRequest(
        request_id="a", token_ids=(1, 2, 3), num_prompt_tokens=3, sampling=SamplingParams(max_tokens=0), choice_index=0,
        end_token_ids=frozenset(), block_ids=((1,),), num_computed_tokens=0, adapter_id=None, resumed=False,
        needs_prompt_logprobs=False, pooling=PoolingJob(needs_every_token=True, first_token=1),
    )  # fmt: skip
    batch.add(new)
    stage.add(new)
    step = SchedulerOutput(
        step_id=1, new_requests=(), running=(), num_scheduled_tokens={"a": 3}, finished_request_ids=(),
        preempted_request_ids=(), block_copies=(), total_num_scheduled_tokens=3,
    )  # fmt: skip
    assert stage.wanted(batch.prepare(step)).token_rows == (1, 2)
    for _ in range(2):
        stage.remove("a")
    with pytest.raises(KeyError):
        stage.wanted(batch.prepare(step))


def test_rows_that_are_no_numbers_fail_their_own_text(tmp_path: Path) -> None:
    model = tiny_encoders.make_encoder("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[77] = float("nan")  # type: ignore[union-attr,index,operator]
    write_modules(save(model, tmp_path), flags("mean", WIDTH))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        expected = llm.embed([[5, 6]])[0].outputs.embedding
        with pytest.raises(RequestFailed, match="NaN or infinite"):
            llm.embed([[5, 6], [7, 77, 8]])
        assert llm.embed([[5, 6]])[0].outputs.embedding == expected


def test_a_generating_model_gives_no_vectors(tiny: Any) -> None:
    with tiny.llm("llama") as llm:
        for refused in (lambda: llm.embed([5]), lambda: llm.classify([5]), lambda: llm.score("a", "b")):
            with pytest.raises(InvalidRequest, match="gives no vectors") as caught:
                refused()
            assert caught.value.field == "model"
        assert llm.generate([5, 6])[0].finished
