"""A KV cache of one byte per element: what models make of it, against Hugging Face with keys and values rounded alike.

The reference rounds each key (rotated) and value to a code and back, by the very scales that the model has, and does
all else in fp32. So the model may differ by no more than fp32 does (some 1e-6), but for a value that lies that near to
the middle between two codes: it may take the other one. All n values, each rounded by up to half a step, change the
logits by 0.1 to 0.2 of their spread; one of them moved by a whole step changes about 2 * sqrt(3 / n) of that.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.engine.kv_calibration import SEED
from octavo.core.layers import kv_scales
from octavo.core.load.checkpoint import Checkpoint, ModelSource, open_checkpoint
from octavo.core.models.base import Model
from octavo.core.parallel.shard import Shard
from octavo.core.quant.open import open_quantized
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.fakes.thread_group import ThreadGroup
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.models.test_generic import make as make_generic

FP8, FNUZ, INT8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.int8
DTYPES = [pytest.param(FP8, id="fp8"), pytest.param(FNUZ, id="fnuz"), pytest.param(INT8, id="int8")]
TOLERANCE = 1e-2
"""Of the spread of the logits: one code may differ, of n = 4000 and more."""
SEEN = 5 * TOLERANCE
"""What rounding all of K and V changes at least: a cache that rounds nothing, or otherwise, fails."""

LENGTH = 40
Scales = Sequence[dict[str, torch.Tensor]]


def make(family: str) -> torch.nn.Module:
    if family == "generic":  # transformers' own modelling, over our cache
        return make_generic("Olmo3ForCausalLM")
    return tiny_models.make_llama() if family == "llama" else tiny_models.make_gemma3()


def rounded(x_BKTD: torch.Tensor, scale_K: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """x at the nearest code's value."""
    scale = torch.ones(1) if scale_K is None else scale_K
    codes = x_BKTD / scale[:, None, None]
    if dtype == INT8:
        return codes.round().clamp(-127, 127) * scale[:, None, None]
    limit = torch.finfo(dtype).max
    return codes.clamp(-limit, limit).to(dtype).float() * scale[:, None, None]


def rounded_logits(
    model: torch.nn.Module, scales: Scales, dtype: torch.dtype, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """Hugging Face's logits with K and V of each layer rounded where its attention takes them."""
    modeling = importlib.import_module(type(model).__module__)
    eager = modeling.eager_attention_forward

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        own = scales[module.layer_idx]
        key, value = (rounded(x, own.get(f"{side}_scale"), dtype) for side, x in (("k", key), ("v", value)))
        return eager(module, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(modeling, "eager_attention_forward", attend)
        return tiny_models.logits_of(model, prompt)


def scales_of(model: Model) -> Scales:
    return [{} if scale is None else scale.keywords() for scale in model.kv_scales()]


@pytest.fixture
def load(backend: Any, tmp_path: Path) -> Callable[..., tuple[Model, StepRunner]]:
    """Saves a Hugging Face model with some tensors more, and loads it."""

    def make(
        model: torch.nn.Module, kv_dtype: torch.dtype, more: dict[str, torch.Tensor] | None = None, **options: Any
    ) -> tuple[Model, StepRunner]:
        checkpoint = stored(model, tmp_path, more)
        loaded, opset = load_model(checkpoint, backend, kv_dtype=kv_dtype, **options)
        checkpoint.close()
        return loaded, StepRunner(loaded, backend, opset)

    return make


def stored(model: torch.nn.Module, folder: Path, more: dict[str, torch.Tensor] | None = None) -> Checkpoint:
    directory = tiny_models.save(model, folder / "model")
    if more:
        path = directory / "model.safetensors"
        save_file(load_file(path) | more, path, {"format": "pt"})
    return open_checkpoint(ModelSource("tiny", directory, "safetensors"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "generic"])
def test_logits_are_those_of_rounded_keys_and_values_in_any_chunks_and_batch(family, dtype, load, monkeypatch):
    model = make(family)
    loaded, runner = load(model, dtype)
    prompt = tiny_models.random_prompt(model.config.vocab_size, LENGTH)
    expected = rounded_logits(model, scales_of(loaded), dtype, prompt, monkeypatch)
    assert relative_error(tiny_models.logits_of(model, prompt), expected) > SEEN
    for chunk in (LENGTH, 9, 1):
        assert relative_error(runner.prompt(f"chunk-{chunk}", prompt, chunk), expected) < TOLERANCE, chunk
    other = tiny_models.random_prompt(model.config.vocab_size, 23, seed=1)
    together = runner.step([("other", other), ("again", prompt), ("more", other[:5])])
    assert relative_error(together[1], expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [FP8, INT8])
@pytest.mark.parametrize(
    ("names", "shape"),
    [
        ("self_attn.{}_scale", ()),
        ("self_attn.attn.{}_scale", (1,)),
        ("self_attn.{}_proj.output_scale", (2,)),
        ("self_attn.{}_proj.{}_scale", (2, 1, 1)),
    ],
)
def test_scales_of_a_checkpoint_are_used(names, shape, dtype, load, monkeypatch):
    model = make("llama")
    prompt = tiny_models.random_prompt(model.config.vocab_size, LENGTH)

    def scaled(factor: float) -> tuple[Model, StepRunner, Scales]:
        base = torch.full(shape, factor) * (1 + 0.5 * torch.arange(2.0).reshape(shape) if 2 in shape else 1)
        stored, scales = {}, []
        for layer in range(model.config.num_hidden_layers):
            own = {}
            for side, size in (("k", 0.01), ("v", 0.02)):
                stored[f"model.layers.{layer}.{names.replace('{}', side)}"] = base * size
                # An int8 cache has a largest code of 127 where the scale was made for one of 448.
                own[f"{side}_scale"] = (base * size).flatten().expand(2) * (448 / 127 if dtype == INT8 else 1)
            scales.append(own)
        return (*load(model, dtype, stored), scales)

    loaded, runner, scales = scaled(1.0)
    for found, wanted in zip(scales_of(loaded), scales, strict=True):
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], wanted[name], rtol=1e-6) for name in wanted)
    logits = runner.prompt("prompt", prompt)
    assert relative_error(logits, rounded_logits(model, scales, dtype, prompt, monkeypatch)) < TOLERANCE
    _, too_small, _ = scaled(0.1)
    assert relative_error(too_small.prompt("prompt", prompt), logits) > SEEN


def test_one_scale_for_keys_and_values(load):
    model = make("llama")
    layers = range(model.config.num_hidden_layers)
    loaded, _ = load(model, FP8, {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.25) for layer in layers})
    assert all(bool((scale == 0.25).all()) for own in scales_of(loaded) for scale in own.values())


def test_a_layer_without_scales_has_one_for_floats_and_calibrated_ones_for_integers(load):
    model = make("llama")
    only_k = {"model.layers.1.self_attn.k_scale": torch.tensor(0.25)}
    floats, integers = (scales_of(load(model, dtype, only_k)[0]) for dtype in (FP8, INT8))
    assert floats[0] == floats[2] == {}
    assert floats[1]["k_scale"].tolist() == [0.25, 0.25]
    assert floats[1]["v_scale"].tolist() == [1.0, 1.0]
    assert integers[1]["k_scale"].tolist() == pytest.approx([0.25 * 448 / 127] * 2)
    calibrated = scales_of(load(model, INT8)[0])
    assert torch.equal(integers[1]["v_scale"], calibrated[1]["v_scale"])
    assert torch.equal(integers[0]["k_scale"], calibrated[0]["k_scale"])


def test_the_other_flavour_of_floats_takes_scales_by_its_own_largest_code(load):
    model = make("llama")
    loaded, _ = load(model, FNUZ, {"model.layers.0.self_attn.k_scale": torch.tensor(0.25)})
    assert scales_of(loaded)[0]["k_scale"].tolist() == pytest.approx([0.25 * 448 / 240] * 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(value, load):
    with pytest.raises(CheckpointError, match="positive") as caught:
        load(make("llama"), FP8, {"model.layers.0.self_attn.k_scale": torch.tensor(value)})
    assert caught.value.field == "model.layers.0.self_attn.k_scale"


def test_a_scale_of_another_shape_is_refused(load):
    with pytest.raises(CheckpointError, match="k_scale"):
        load(make("llama"), FP8, {"model.layers.0.self_attn.k_scale": torch.ones(3)})


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_calibration_gives_every_head_its_largest_value_with_room_above(family, load, monkeypatch):
    model = make(family)
    found, again, in_steps = (
        scales_of(load(model, INT8, max_model_len=64, max_num_batched_tokens=tokens)[0]) for tokens in (64, 64, 24)
    )
    rng = random.Random(SEED)
    ids = [rng.randrange(model.config.vocab_size) for _ in range(64)]
    for layer, largest in enumerate(largest_values(model, ids, monkeypatch)):
        for side in ("k", "v"):
            scale_K = found[layer][f"{side}_scale"]
            assert torch.allclose(scale_K, largest[side] * kv_scales.MARGIN / 127, rtol=1e-4)
            assert torch.equal(scale_K, again[layer][f"{side}_scale"])
            assert torch.allclose(scale_K, in_steps[layer][f"{side}_scale"], rtol=1e-5)


def largest_values(model: torch.nn.Module, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of each KV head, as Hugging Face's attention gets them."""
    modeling = importlib.import_module(type(model).__module__)
    eager, found = modeling.eager_attention_forward, []

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        found.append({"k": key[0].abs().amax(dim=(1, 2)), "v": value[0].abs().amax(dim=(1, 2))})
        return eager(module, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(modeling, "eager_attention_forward", attend)
        tiny_models.logits_of(model, ids)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ranks_calibrate_the_heads_they_hold_to_the_scales_of_the_whole_model(family, tmp_path):
    checkpoint = stored(make(family), tmp_path)
    whole = scales_of(load_model(checkpoint, ReferenceBackend(), kv_dtype=INT8)[0])
    group = ThreadGroup(2)
    try:
        ranks = group.run(
            lambda rank: load_model(
                checkpoint, ReferenceBackend(), kv_dtype=INT8, shard=Shard.of(group.comms[rank])
            )[0]
        )  # fmt: skip
    finally:
        group.close()
        checkpoint.close()
    for layer, own in enumerate(whole):
        for side, scale_K in own.items():
            parts = [scales_of(rank)[layer][side] for rank in ranks]
            # A head that both ranks attend to is held, and measured, by both.
            mine = torch.cat(parts) if len(scale_K) > 1 else parts[0]
            assert torch.allclose(mine, scale_K, rtol=1e-5), (layer, side)
            assert len(scale_K) > 1 or torch.allclose(parts[1], scale_K, rtol=1e-5)


def test_a_scheme_says_what_a_checkpoints_scales_mean(tmp_path, backend):
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False, "symmetric": True}
    model = make("llama")
    model.config.quantization_config = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    names = [f"model.layers.0.self_attn.{side}_proj.output_scale" for side in "kv"]
    files = stored(model, tmp_path, {name: torch.tensor(0.25) for name in names})
    checkpoint, formats = open_quantized(files)
    loaded, _ = load_model(checkpoint, backend, kv_dtype=INT8, formats=formats)
    assert scales_of(loaded)[0]["k_scale"].tolist() == [0.25, 0.25]
    loaded, _ = load_model(checkpoint, backend, kv_dtype=FP8, formats=formats)
    assert scales_of(loaded)[0]["k_scale"].tolist() == pytest.approx([0.25 * 127 / 448] * 2)
    checkpoint.close()


def test_latents_are_kept_as_8_bit_floats(load, monkeypatch):
    model = FAMILIES["deepseek_v3"].make()
    modeling = importlib.import_module(type(model).__module__)
    _, runner = load(model, FP8)
    prompt = tiny_models.random_prompt(model.config.vocab_size, LENGTH)
    plain = tiny_models.logits_of(model, prompt)
    hooks = [
        layer.self_attn.kv_a_layernorm.register_forward_hook(lambda _, __, out: rounded(out[:, None], None, FP8)[:, 0])
        for layer in model.model.layers
    ]
    for name in ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"):
        turn = getattr(modeling, name)

        def rounding(*args: Any, turn: Any = turn, **kwargs: Any) -> Any:
            q, k = turn(*args, **kwargs)
            return q, rounded(k, None, FP8)

        monkeypatch.setattr(modeling, name, rounding)
    expected = tiny_models.logits_of(model, prompt)
    for hook in hooks:
        hook.remove()
    assert relative_error(plain, expected) > SEEN
    for chunk in (LENGTH, 9):
        assert relative_error(runner.prompt(f"chunk-{chunk}", prompt, chunk), expected) < TOLERANCE


def test_latents_are_refused_as_integers(load):
    with pytest.raises(ConfigError, match=r"latents .* use fp8 or auto") as caught:
        load(FAMILIES["deepseek_v3"].make(), INT8)
    assert caught.value.field == "kv_cache_dtype"
