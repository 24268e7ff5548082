"""adapter_config.json: which layers, which rank, which scale, by PEFT's own rules; and what is refused."""

from __future__ import annotations

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.core.base.errors import CheckpointError
from octavo.core.lora.adapter import read_settings
from octavo.core.lora.settings import LoraSettings
from tests.fakes import tiny_models

LAYERS = [
    f"model.layers.{i}.{name}"
    for i in range(3)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )
]  # fmt: skip


def read(tmp_path, **fields):
    values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **fields}
    return LoraSettings.read(json.loads(json.dumps(values)), tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "down_proj"]},
        {"target_modules": r".*\.(q|o)_proj"},
        {"target_modules": r"model\.layers\.[02]\.mlp\..*_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": ["v_proj", "model.layers.2.mlp.up_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj", "model.layers.1.mlp.up_proj"], "layers_to_transform": 2},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
        {"r": 6, "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3}, "target_modules": ["q_proj", "up_proj"]},
        {"alpha_pattern": {"layers.0.self_attn.q_proj": 32, "^model.layers.2.*": 1}, "target_modules": ["q_proj"]},
        {"use_rslora": True, "rank_pattern": {"v_proj": 9}, "target_modules": ["q_proj", "v_proj"]},
    ],
    ids=lambda fields: ",".join(f"{key}={value}" for key, value in fields.items())[:70],
)
def test_layers_ranks_and_scales_are_those_of_peft(tmp_path, fields):
    import peft

    model = peft.get_peft_model(
        tiny_models.make_llama(), peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 8, **fields})
    )
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    settings = read(tmp_path, **fields)
    ours = {name: (settings.rank_of(name), settings.scale_of(name)) for name in LAYERS if settings.selects(name)}
    assert ours == theirs


def test_what_peft_writes_is_read(tmp_path):
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, use_rslora=True, target_modules=["q_proj"], lora_dropout=0.2)
    config.save_pretrained(tmp_path)
    settings = LoraSettings.read(json.loads((tmp_path / "adapter_config.json").read_text()), tmp_path)
    assert settings.scale_of("model.layers.0.self_attn.q_proj") == 6 / math.sqrt(4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("peft_type", None),
        ("bias", "all"),
        ("use_dora", True),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [3]),
        ("fan_in_fan_out", True),
        ("target_parameters", "mlp.experts.down_proj"),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("ensure_weight_tying", True),
        ("use_qalora", True),
        ("alora_invocation_tokens", [5]),
        ("kasa_config", {"beta": 1}),
        ("some_field_of_next_year", 0.5),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "loftq"),
        ("r", 0),
        ("r", 2.5),
        ("lora_alpha", "8"),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"(": 2}),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", ["q_proj"]),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", "q_proj("),
        ("target_modules", [1]),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", 5),
        ("layers_pattern", True),
        ("layers_pattern", {"layers": 1}),
        ("use_rslora", "yes"),
        ("lora_alpha", 1e300),
    ],
)
def test_what_would_change_the_mathematics_is_refused_by_name(tmp_path, field, value):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **{field: value})
    assert caught.value.field == field
    assert field in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_pattern_that_takes_for_ever_is_an_error_within_a_second(tmp_path, field):
    settings = read(tmp_path, **{field: r"(?:[\w.]|[\w.]{2})+[!x]"})
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="takes more than"):
        settings.selects("model.layers.0.self_attn.q_proj_of_a_long_name_that_goes_on")
    assert time.monotonic() - started < 5


def test_a_pipe_in_place_of_the_config_is_an_error_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "adapter_config.json")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_settings, tmp_path)
        try:
            with pytest.raises(CheckpointError, match="no regular file"):
                reading.result(timeout=10)
        finally:
            os.close(os.open(tmp_path / "adapter_config.json", os.O_RDWR | os.O_NONBLOCK))  # whoever waits goes on


def test_unknown_fields_that_say_nothing_are_let_through(tmp_path):
    read(tmp_path, new_a=None, new_b=False, new_c={}, new_d=[], megatron_core="megatron.core", lora_dropout=0.3)


def test_every_field_of_peft_is_known_here(tmp_path):
    """A release of PEFT with a field that this version does not know fails here, and has to be looked at."""
    import dataclasses

    import peft

    from octavo.core.lora import settings as module

    known = {*module._READ, *module._INERT, *module._REFUSED}
    judged_by_their_name_alone = {"kasa_config", "monteclora_config", "velora_config", "arrow_config", "use_bdlora"}
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    assert fields - known - judged_by_their_name_alone == set()


@pytest.mark.parametrize(("r", "rslora", "scale"), [(4, False, 2.0), (16, False, 0.5), (4, True, 4.0), (16, True, 2.0)])
def test_a_scale_is_alpha_over_the_rank_or_its_root(tmp_path, r, rslora, scale):
    """vllm#6909, #10798."""
    assert read(tmp_path, r=r, lora_alpha=8, use_rslora=rslora).scale_of("q_proj") == scale
