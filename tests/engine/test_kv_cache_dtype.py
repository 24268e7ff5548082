"""`kv_cache_dtype`: what it becomes on a device, what is refused, and that engines answer as well with it."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.backends.cpu import attention, cache
from octavo.core.backend import Capabilities, KVCache, KVCacheSpec, KVLayout
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import BackendUnavailable, ConfigError
from octavo.core.base.params import SamplingParams
from octavo.core.engine.kv_dtype import check_readable
from octavo.core.engine.plan import plan_model
from octavo.core.engine.resolve import resolve_sizes
from octavo.core.quant.kv_scheme import KVScheme
from tests.engine.worlds import NullWorld, TinyModels, engine_of
from tests.fakes import tiny_models
from tests.fakes.null_backend import NullBackend

FP8, FNUZ, INT8, F32 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8, torch.float32
MODEL: Any = SimpleNamespace(max_position=64, rotary_switch_tokens=None)
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def device(**changes: Any) -> Capabilities:
    return replace(NullBackend().capabilities, **changes)


@pytest.mark.parametrize(
    ("asked", "flavour", "stored"),
    [("fp8", None, FP8), ("fp8", "e4m3fn", FP8), ("fp8", "e4m3fnuz", FNUZ), ("int8", None, INT8), ("auto", None, F32)],
)
def test_one_byte_needs_nothing_of_the_device(null: NullWorld, asked: str, flavour: str | None, stored: Any) -> None:
    sizes = resolve_sizes(null.config(kv_cache_dtype=asked), {}, MODEL, device(fp8=flavour))
    assert sizes.kv_dtype == stored


@pytest.mark.parametrize(
    ("scheme", "listed", "stored", "says"),
    [
        (KVScheme(is_float=True), (F32, FP8), FP8, ""),
        (KVScheme(is_float=False), (F32, INT8), INT8, ""),
        (KVScheme(is_float=True), (F32, INT8), F32, "no ops of its own for fp8 KV"),
        (KVScheme(is_float=True, refusal="zero points"), (F32, FP8), F32, "zero points"),
    ],
)
def test_auto_takes_what_the_checkpoint_was_calibrated_for_where_the_device_has_ops_for_it(
    null: NullWorld, caplog: Any, scheme: KVScheme, listed: Any, stored: torch.dtype, says: str
) -> None:
    with caplog.at_level(logging.INFO):
        sizes = resolve_sizes(null.config(), {}, MODEL, device(kv_dtypes=listed, fp8="e4m3fn"), scheme)
    assert sizes.kv_dtype == stored
    assert says in caplog.text
    assert ("kv_cache_scheme is passed over" in caplog.text) == bool(says)


def test_scales_that_can_not_be_used_are_named(null: NullWorld, caplog: Any) -> None:
    scheme = KVScheme(refusal="zero points of KV are not implemented")
    assert resolve_sizes(null.config(kv_cache_dtype="fp8"), {}, MODEL, device(), scheme).kv_dtype == FP8
    assert scheme.refusal in caplog.text


def test_a_promise_of_the_devices_ops_alone_is_not_given_for_others(null: NullWorld) -> None:
    config = null.config(kv_cache_dtype="int8", deterministic=True)
    with pytest.raises(ConfigError, match="no ops of its own") as caught:
        resolve_sizes(config, {}, MODEL, device())
    assert caught.value.field == "kv_cache_dtype"
    assert resolve_sizes(config, {}, MODEL, device(kv_dtypes=(F32, INT8))).kv_dtype == INT8


def test_memory_that_torch_can_not_read_keeps_what_its_device_lists() -> None:
    view = KVCache(KVCacheSpec(1, 4, 4, INT8, 16), KVLayout.NHD, 2, None, None)
    with pytest.raises(ConfigError, match="keeps only float32") as caught:
        check_readable(view, device())
    assert caught.value.field == "kv_cache_dtype"
    check_readable(view, device(kv_dtypes=(F32, INT8)))


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_plan_counts_it_as_the_engine_does(tiny: TinyModels, dtype: str) -> None:
    config = EngineConfig(
        model=str(tiny.directory("gemma3")), backend="cpu", kv_cache_dtype=dtype, kv_cache_memory_bytes=200_000
    )
    plan, plain = plan_model(config), plan_model(replace(config, kv_cache_dtype="float32"))
    assert 4 * plan.kv_bytes_per_token == plain.kv_bytes_per_token
    assert dtype.removeprefix("fp8") in plan.kv_dtype
    engine = engine_of(config)
    assert engine.num_kv_blocks == plan.num_kv_blocks > 3 * plain.num_kv_blocks
    engine.close()


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_the_cpu_has_ops_of_its_own_for_one_byte(tiny: TinyModels, dtype: str) -> None:
    with tiny.llm("llama", kv_cache_dtype=dtype, strict_backend=True, deterministic=True) as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_what_the_device_has_no_ops_for_runs_on_the_reference_or_not_at_all(
    tiny: TinyModels, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, cache):
        monkeypatch.setattr(module, "KV_DTYPE_CODES", {torch.float32: 0})
    with tiny.llm("llama", kv_cache_dtype="int8") as llm:
        llm.generate([[1, 2, 3]], GREEDY)
    fallbacks = [record.message for record in caplog.records if "runs on the reference" in record.message]
    assert [message.split()[0] for message in fallbacks] == ["write_kv", "paged_attention"]
    with pytest.raises(BackendUnavailable, match=r"write_kv .*int8"):
        tiny.llm("llama", kv_cache_dtype="int8", strict_backend=True)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_reply_is_the_same_alone_in_a_batch_in_chunks_and_from_the_cache(
    tiny: TinyModels, family: str, dtype: str
) -> None:
    """Tokens of a tiny random model are far from ties, so that fp32's last bits do not decide."""
    size = tiny.reference(family).config.vocab_size
    prompts = [tiny_models.random_prompt(size, length) for length in (5, 37, 60)]
    with tiny.llm(family, kv_cache_dtype=dtype) as llm:
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts]
        again = llm.generate(prompts, GREEDY)
        assert [output.outputs[0].token_ids for output in again] == alone
        assert again[2].num_cached_tokens > 0
    with tiny.llm(family, kv_cache_dtype=dtype, max_num_batched_tokens=16, max_num_seqs=3) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == alone


PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little girl who lived in a village near the forest.",
    "def fibonacci(n):\n",
)


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_smollm2_continues_as_it_does_with_unrounded_keys_and_values(dtype: str) -> None:
    """Greedy replies part at the first near tie, so each token is asked for after fp32's own: 3 times 16 of them.

    What fp32 prefers clearly (by a nat) must stay the first choice; near ties may fall either way, but not many.
    """
    options: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 256, "progress": False}
    with LLM("smollm2", backend="cpu", **options) as llm:
        plain = llm.generate(list(PROMPTS), replace(GREEDY, logprobs=2))
    whole = [output.prompt_token_ids + output.outputs[0].token_ids for output in plain]
    with LLM("smollm2", backend="cpu", kv_cache_dtype=dtype, **options) as llm:
        scored = llm.generate(whole, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1))
    kept, gaps = [], []
    for first, second in zip(plain, scored, strict=True):
        assert first.outputs[0].logprobs is not None
        assert second.prompt_logprobs is not None
        for place, token in enumerate(first.outputs[0].token_ids):
            top = sorted((entry.logprob for entry in first.outputs[0].logprobs[place].values()), reverse=True)
            found = second.prompt_logprobs[len(first.prompt_token_ids) + place]
            assert found is not None
            kept.append(found[token].rank == 1)
            gaps.append(top[0] - top[1])
    assert len(kept) == 48
    assert all(same for gap, same in zip(gaps, kept, strict=True) if gap > 1)
    assert sum(kept) >= 40
