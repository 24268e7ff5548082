"""`plan_model` says what the engine then does, and reads no weight."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.params import SamplingParams
from octavo.core.engine.plan import plan_model
from octavo.core.engine.wire import EngineRequest
from tests.engine.worlds import NullWorld, TinyModels, drive, engine_of

TOKEN_BYTES = 64
"""KV of one token of one layer pair of the Null model: two layers, key and value, 4 elements of 4 bytes."""


def test_a_plan_is_what_the_engine_does(null: NullWorld) -> None:
    for options in (
        {"num_kv_blocks": 33},
        {"kv_cache_memory_bytes": 100_000, "block_size": 8},
        {"kv_cache_memory_bytes": 100_000, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 8},
    ):
        config = null.config({"windows": [None, 32, 32, None]}, **options)
        plan, engine = plan_model(config), engine_of(config)
        assert plan.num_kv_blocks == engine.num_kv_blocks
        assert plan.max_model_len == engine.sizes.max_model_len
        assert plan.block_size == engine.sizes.block_size
        engine.close()


def test_the_figures_of_a_plan(null: NullWorld) -> None:
    plan = plan_model(null.config(num_kv_blocks=257, backend_options={"memory_bytes": "1000000"}))
    assert (plan.device, plan.dtype, plan.kv_dtype) == ("null", "float32", "float32")
    assert (plan.weight_bytes, plan.free_bytes, plan.total_bytes) == (0, 1_000_000, 1_000_000)
    assert plan.kv_bytes_per_token == TOKEN_BYTES
    assert plan.kv_bytes == 257 * 16 * TOKEN_BYTES
    assert (plan.max_model_len, plan.model_limit) == (4096, 4096)
    assert list(plan.concurrency) == [(128, 32), (512, 8), (2048, 2)]
    assert "at 512 tokens" in str(plan)
    assert "8 requests at once" in str(plan)


def test_windows_count(null: NullWorld) -> None:
    """A closed window holds no more blocks, however long the request."""
    full = plan_model(null.config({"windows": [None] * 4}, kv_cache_memory_bytes=1 << 20))
    windowed = plan_model(null.config({"windows": [None, 64, 64, 64]}, kv_cache_memory_bytes=1 << 20))
    assert windowed.kv_bytes_per_token == full.kv_bytes_per_token
    assert dict(windowed.concurrency)[2048] > 2 * dict(full.concurrency)[2048]


@pytest.mark.parametrize("length", [128, 512])
def test_so_many_requests_really_run_at_once(null: NullWorld, length: int) -> None:
    options = {"num_kv_blocks": 200, "max_num_batched_tokens": 4096, "enable_prefix_caching": False}
    config = null.config(**options)
    count = dict(plan_model(config).concurrency)[length]
    engine, running = engine_of(config), set()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    drive(
        engine,
        [EngineRequest(request_id=str(i), prompt_token_ids=[1] * (length - 8), params=params) for i in range(count)],
        between=lambda _: running.add(engine.stats().num_running),
    )
    assert (max(running), engine.stats().preemptions) == (count, 0)
    engine.close()


def test_no_weight_is_read(tiny: TinyModels, tmp_path: Path) -> None:
    shutil.copytree(tiny.directory("gemma3"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    raw = file.read_bytes()
    header_end = 8 + int.from_bytes(raw[:8], "little")
    file.write_bytes(raw[:header_end] + bytes(len(raw) - header_end))
    plan = plan_model(EngineConfig(model=str(tmp_path / "model"), backend="cpu", num_kv_blocks=100))
    parameters = sum(parameter.numel() for parameter in tiny.reference("gemma3").parameters())
    assert plan.weight_bytes == 4 * parameters
    assert plan.fits


def test_weights_that_do_not_fit_are_the_plans_verdict(null: NullWorld, tiny: TinyModels) -> None:
    options = {"backend": "null", "backend_options": {"memory_bytes": "100000"}}
    model = str(tiny.directory("llama"))
    plan = plan_model(EngineConfig(model=model, **options))
    assert not plan.fits
    assert (plan.num_kv_blocks, plan.max_model_len, list(plan.concurrency)) == (0, 0, [])
    assert "the weights do not fit" in str(plan)
    with pytest.raises(ConfigError, match=r"the weights take .* as float32, but 97\.7 KiB are free"):
        engine_of(EngineConfig(model=model, progress=False, **options))


def test_a_budget_that_can_not_be_is_an_error(null: NullWorld) -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks"):
        plan_model(null.config(num_kv_blocks=1))
    with pytest.raises(ConfigError, match="max_model_len is 200, but 11 KV blocks hold 160"):
        plan_model(null.config(num_kv_blocks=11, max_model_len=200))
    assert all(backend.closed for backend in null.backends)


def test_over_devices_a_plan_is_of_one_of_them(tiny: TinyModels) -> None:
    """KV heads are split, or one of them shared; matrices are split, vectors are not."""
    common = {"model": str(tiny.directory("llama")), "backend": "cpu", "kv_cache_memory_bytes": 1 << 20}
    alone, of_two = (plan_model(EngineConfig(**common, tensor_parallel_size=size)) for size in (1, 2))
    vectors = sum(p.numel() for p in tiny.reference("llama").parameters() if p.dim() == 1)
    assert 2 * (of_two.weight_bytes - 4 * vectors) == alone.weight_bytes - 4 * vectors
    assert 2 * of_two.kv_bytes_per_token == alone.kv_bytes_per_token
    assert of_two.num_kv_blocks > 1.9 * alone.num_kv_blocks
    assert of_two.free_bytes < 0.6 * alone.free_bytes  # the cpu's ranks share its memory
    assert "over             2 devices; every figure is of each" in str(of_two)
    assert "devices" not in str(alone)
    one_head = {**common, "model": str(tiny.directory("gemma3"))}  # that every device has
    sizes = [plan_model(EngineConfig(**one_head, tensor_parallel_size=size)).kv_bytes_per_token for size in (1, 2, 4)]
    assert sizes == [sizes[0]] * 3
    with pytest.raises(ConfigError, match="tensor_parallel_size is 4, which can't split num_attention_heads, 6"):
        plan_model(EngineConfig(**common, tensor_parallel_size=4))
    with pytest.raises(ConfigError, match="tensor_parallel_size is 3, but this device works in groups of 1, 2, 4, 8"):
        plan_model(EngineConfig(**common, tensor_parallel_size=3))


def test_an_encoder_keeps_nothing_and_computes_texts_whole() -> None:
    plan = plan_model(EngineConfig(model="minilm", backend="cpu", max_num_batched_tokens=600))
    assert (plan.kv_bytes_per_token, plan.num_kv_blocks, plan.kv_bytes) == (0, 0, 0)
    assert (plan.max_model_len, plan.model_limit) == (256, 512)
    assert list(plan.concurrency) == [(128, 4)]
    assert "KV cache         none: texts are computed whole" in str(plan)
