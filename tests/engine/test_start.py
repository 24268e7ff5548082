"""What an engine refuses to start with, in one line each, and that nothing is left behind when it does not start."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.core.backend import Capabilities
from octavo.core.base.errors import BackendUnavailable, CheckpointError, ConfigError, UserError
from octavo.core.base.params import SamplingParams
from octavo.core.engine.resolve import resolve_sizes
from tests.engine.worlds import NullWorld, TinyModels
from tests.fakes.null_backend import NullBackend, NullOps

BLOCK_BYTES = 16 * 4 * 2 * 4 * 2
"""Of the Null model: 16 tokens, 4 elements of key and of value, 4 bytes each, 2 layers."""


@pytest.mark.parametrize(
    ("options", "kind", "field", "says"),
    [
        ({"backend": "nul"}, BackendUnavailable, "backend", "did you mean null?"),
        ({"backend_options": {"memory": "1"}}, ConfigError, None, "memory_bytes"),
        ({"dtype": "bfloat16"}, ConfigError, "dtype", "does not store; use float32"),
        ({"kv_cache_dtype": "float16"}, ConfigError, "kv_cache_dtype", "does not store; use float32"),
        ({"max_model_len": 4097}, ConfigError, "max_model_len", "made for 4096 positions"),
        ({"max_num_batched_tokens": 255}, ConfigError, "max_num_batched_tokens", "below max_num_seqs 256"),
        ({"num_kv_blocks": 1}, ConfigError, "num_kv_blocks", "one token needs 2"),
        ({"kv_cache_memory_bytes": BLOCK_BYTES}, ConfigError, "kv_cache_memory_bytes", "one token needs 2"),
        ({"num_kv_blocks": 11, "max_model_len": 161}, ConfigError, "max_model_len", "11 KV blocks hold 160 tokens"),
        ({"kv_cache_memory_bytes": 11 * BLOCK_BYTES, "max_model_len": 161}, ConfigError, "max_model_len", "hold 160"),
        ({"num_kv_blocks": 10**9}, ConfigError, "num_kv_blocks", "of KV cache, but 1"),
        ({"kv_cache_memory_bytes": 1 << 32, "max_num_seqs": 10_000}, ConfigError, None, "lower kv_cache_memory_bytes"),
        ({"backend_options": {"memory_bytes": "1000"}}, ConfigError, "kv_memory_fraction", "free memory"),
        ({"model": "/no/such/model"}, UserError, "model", "no file or directory"),
    ],
)
def test_what_can_not_start_says_why_in_one_line(
    null: NullWorld, options: dict[str, Any], kind: type[Exception], field: str | None, says: str
) -> None:
    options = {"model": null.model(), "backend": "null", "progress": False} | options
    with pytest.raises(kind) as caught:
        LLM(**options)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    if field is not None:
        assert caught.value.field == field  # type: ignore[attr-defined]
    del caught
    null.check_nothing_is_left()


def test_an_open_max_model_len_is_lowered_to_what_the_pool_holds(
    null: NullWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """vllm#35541: max_model_len above the pool at start."""
    with caplog.at_level(logging.WARNING), null.llm(num_kv_blocks=11) as llm:
        assert llm.max_model_len == 160
        (output,) = llm.generate([[1] * 100], SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 60
    assert "lowered from 4096 to 160" in caplog.text


def test_the_kv_cache_takes_a_share_of_what_is_really_free(null: NullWorld) -> None:
    options = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "backend_options": {"memory_bytes": "1000000"}}
    engine = null.engine({"max_position": 100_000}, **options, kv_memory_fraction=0.25)
    assert engine.num_kv_blocks == pytest.approx(250_000 / BLOCK_BYTES, rel=0.02)
    engine.close()
    engine = null.engine({"max_position": 100_000, "vocab_size": 200_000}, **options, kv_memory_fraction=0.25)
    assert engine.num_kv_blocks == pytest.approx(50_000 / BLOCK_BYTES, rel=0.02)  # a row of logits is 800 kB
    engine.close()
    engine = null.engine({"max_position": 100_000}, **options)
    assert engine.num_kv_blocks == pytest.approx(500_000 / BLOCK_BYTES, rel=0.02)  # the device's own share
    engine.close()
    engine = null.engine({"max_position": 128}, **options)
    assert engine.num_kv_blocks == 1 + 128 // 16  # no more than could ever be used
    engine.close()


def test_deterministic_is_refused_by_a_backend_that_can_not_promise_it(
    null: NullWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    null.llm(deterministic=True, num_kv_blocks=10).close()
    init = Capabilities.__init__

    def variant(self: Capabilities, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs | {"batch_invariant": False})

    monkeypatch.setattr(Capabilities, "__init__", variant)
    with pytest.raises(BackendUnavailable, match="null can't promise"):
        null.llm(deterministic=True, num_kv_blocks=10)
    null.llm(num_kv_blocks=10).close()
    null.check_nothing_is_left()


def test_strict_backend_names_the_op_that_would_fall_back(null: NullWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    null.llm(strict_backend=True, num_kv_blocks=10).close()
    init = NullOps.__init__

    def without_sample(self: NullOps) -> None:
        init(self)
        del self.sample

    monkeypatch.setattr(NullOps, "__init__", without_sample)
    with pytest.raises(BackendUnavailable, match=r"no kernel of its own for sample \(null has no sample\)"):
        null.llm(strict_backend=True, num_kv_blocks=10)
    with null.llm(num_kv_blocks=10) as llm:  # the reference fills in
        llm.generate([[1]], SamplingParams(max_tokens=3, top_k=2))
        (sample,) = [choice for choice in llm.op_choices() if choice.op == "sample"]
        assert (sample.implementation, sample.calls) == ("fallback", 3)
    null.check_nothing_is_left()


@pytest.mark.parametrize("where", ["kv_view", "allocate_kv_pool", "compile", "memory_info"])
def test_a_start_that_fails_anywhere_leaves_nothing(
    null: NullWorld, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def broken(*_args: Any) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(f"tests.fakes.null_backend.NullBackend.{where}", broken)
    with pytest.raises((MemoryError, BackendUnavailable), match="no more"):
        null.llm(num_kv_blocks=10)
    null.check_nothing_is_left()


def test_a_checkpoint_that_fails_to_load_leaves_nothing(tiny: TinyModels, tmp_path: Path) -> None:
    whole = tiny.directory("llama")
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())
    tensors = load_file(whole / "model.safetensors")
    missing = "model.layers.2.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != missing}, tmp_path / "model.safetensors")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(CheckpointError, match=missing):
            LLM(str(tmp_path), backend="cpu", num_threads=2, progress=False, num_kv_blocks=10)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16), ("auto", torch.bfloat16)],
)
def test_the_cache_stores_what_the_model_computes_in(null: NullWorld, dtype: str, kv_dtype: torch.dtype) -> None:
    """And the device's first type where it can't: here for models in bfloat16 and by default."""
    device = replace(
        NullBackend().capabilities,
        activation_dtype={torch.float32: torch.float32, torch.float16: torch.float16, torch.bfloat16: torch.float64},
        default_dtype=torch.bfloat16,
        kv_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )
    model: Any = SimpleNamespace(max_position=64, rotary_switch_tokens=None)
    assert resolve_sizes(null.config(dtype=dtype), {}, model, device).kv_dtype == kv_dtype
    chosen = null.config(dtype=dtype, kv_cache_dtype="float16")
    assert resolve_sizes(chosen, {}, model, device).kv_dtype == torch.float16


def test_closing_gives_everything_back(null: NullWorld) -> None:
    for _ in range(3):
        with null.llm({"windows": [None, 8]}, num_kv_blocks=200) as llm:
            llm.generate([[1, 2, 3]] * 5, SamplingParams(max_tokens=20, logprobs=2, prompt_logprobs=1))
            assert null.backends[-1].live_bytes > 0
            assert not null.backends[-1].closed
        del llm
        null.check_nothing_is_left()


def test_an_llm_that_is_forgotten_gives_everything_back(null: NullWorld) -> None:
    llm = null.llm(num_kv_blocks=200)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    del llm
    null.check_nothing_is_left()


def test_closing_with_requests_running_gives_everything_back(null: NullWorld) -> None:
    llm = null.llm(num_kv_blocks=200)
    stream = llm.generate_stream([1, 2, 3], SamplingParams(max_tokens=20))
    next(stream)
    llm.close()
    stream.close()
    del llm, stream
    gc.collect()
    null.check_nothing_is_left()
