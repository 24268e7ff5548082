"""Position schemes: tables equal Hugging Face's in every form of config, and the longest position is derived once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.core.base.errors import CheckpointError
from octavo.core.layers.rope import RopeParameters
from octavo.core.layers.rope_scaling import YarnScaling
from octavo.core.models.config import ConfigReader
from octavo.core.models.registry import read_config
from octavo.core.models.rope import derived_max_position, read_layer_ropes, read_rope
from tests.fakes.families import FAMILIES

HEAD_DIM, POSITIONS = 32, 300
SIZES: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": 128}
LISTS = {"short_factor": [1.0 + i / 16 for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
SCHEMES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"original_max_position_embeddings": 64} | LISTS,
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}
YARNS: dict[str, dict[str, Any]] = {
    "no-original": {"factor": 4.0},
    "attention-factor": {"factor": 4.0, "attention_factor": 1.7},
    "both-mscales": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    "one-mscale": {"factor": 40.0, "mscale": 0.707},
    "zero-mscale": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    "betas": {"factor": 4.0, "beta_fast": 8.0, "beta_slow": 2.0},
    "equal-betas": {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "not-truncated": {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 40},
    "short-original": {"factor": 32.0, "original_max_position_embeddings": 4},
    "factor-from-lengths": {"factor": None, "original_max_position_embeddings": 32},
    "shrinking": {"factor": 0.5},
}


def reference(section: dict[str, Any], num_tokens: int, beside: dict[str, Any] | None = None) -> torch.Tensor:
    """cos_sin [POSITIONS, R] by Hugging Face for requests of so many tokens."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SIZES, head_dim=HEAD_DIM, rope_parameters=dict(section), **(beside or {}))
    kind = config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind) or LlamaRotaryEmbedding.compute_default_rope_parameters
    frequencies, factor = compute(config, device=torch.device("cpu"), seq_len=num_tokens)
    angles = torch.arange(POSITIONS).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * factor


def table(config: dict[str, Any], num_tokens: int = POSITIONS, **options: Any) -> torch.Tensor:
    rope = read_rope(ConfigReader(SIZES | config), HEAD_DIM, default_theta=10_000.0, **options)
    return rope.cos_sin(POSITIONS, num_tokens)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    # Frequencies within an ulp or two: at position 300 an angle may differ by 300 * 2^-23.
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("num_tokens", [50, 64, 65, 200, 300])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tables_equal_hugging_face_in_both_forms(scheme, num_tokens):
    section = {"rope_type": scheme} | SCHEMES[scheme]
    expected = reference(section | {"rope_theta": 5000.0}, num_tokens)
    assert_same(table({"rope_parameters": section | {"rope_theta": 5000.0}}, num_tokens), expected)
    old = {"type": scheme} | SCHEMES[scheme]
    assert_same(table({"rope_scaling": old, "rope_theta": 5000.0}, num_tokens), expected)
    assert_same(table({"rope_scaling": old | section, "rope_theta": 5000.0}, num_tokens), expected)


@pytest.mark.parametrize("seed", range(40))
def test_random_parameters_equal_hugging_face(seed):
    draw = random.Random(seed)
    section: dict[str, Any] = {"rope_theta": 10 ** draw.uniform(1, 6), "factor": draw.uniform(1, 64)}
    original = {"original_max_position_embeddings": draw.randint(4, 200)}
    scheme = draw.choice(["linear", "dynamic", "llama3", "yarn", "longrope"])
    section["rope_type"] = scheme
    if scheme == "llama3":
        low = draw.uniform(0.5, 4)
        section |= original | {"low_freq_factor": low, "high_freq_factor": low + draw.uniform(0.1, 8)}
    if scheme == "yarn":
        slow = draw.uniform(0.2, 4)
        section |= original | {"beta_slow": slow, "beta_fast": slow + draw.uniform(0, 40)}
        section |= {"truncate": draw.random() < 0.5}
        section |= draw.choice(list(YARNS.values())[1:5])
    if scheme == "longrope":
        section |= original | {name: [draw.uniform(1, 64) for _ in range(16)] for name in LISTS}
        section |= draw.choice([{}, {"attention_factor": draw.uniform(0.5, 2)}, {"factor": None}])
    num_tokens = draw.randint(1, POSITIONS)
    assert_same(table({"rope_parameters": section}, num_tokens), reference(section, num_tokens))


@pytest.mark.parametrize("spelling", YARNS)
def test_every_spelling_of_yarn_equals_hugging_face(spelling):
    section = {"rope_type": "yarn", "rope_theta": 10_000.0} | YARNS[spelling]
    assert_same(table({"rope_parameters": section}), reference(section, POSITIONS))


@pytest.mark.parametrize("scheme", ["llama3", "yarn", "longrope"])
def test_an_original_length_beside_the_object_outranks_the_one_inside(scheme):
    section = {"rope_type": scheme, "rope_theta": 10_000.0} | SCHEMES[scheme]
    beside = {"original_max_position_embeddings": 48}
    expected = reference(section, 200, beside)
    assert_same(table({"rope_parameters": section} | beside, 200), expected)
    section.pop("original_max_position_embeddings")
    assert_same(table({"rope_parameters": section} | beside, 200), expected)
    assert not torch.allclose(expected, reference({"rope_type": scheme, "rope_theta": 1e4} | SCHEMES[scheme], 200))


def test_longrope_by_its_other_names():
    expected = table({"rope_scaling": {"type": "longrope"} | SCHEMES["longrope"]})
    for name in ("su", "yarn"):
        assert torch.equal(table({"rope_scaling": {"type": name} | SCHEMES["longrope"]}), expected)


def test_the_temperature_of_latent_attention():
    section = {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    rope = read_rope(ConfigReader(SIZES | {"rope_scaling": section}), HEAD_DIM, default_theta=1e4)
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == 1.0
    assert rope.scaling.softmax_factor == pytest.approx(1.3688879454113936**2)
    assert YarnScaling(40.0, 4096, 1.0).softmax_factor == 1.0


@pytest.mark.parametrize("place", ["beside", "inside", "inside-outranks", "default"])
def test_partial_rotation_in_every_place(place):
    section: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    expected = reference(section, POSITIONS)
    assert expected.shape == (POSITIONS, 8)
    bare = {name: value for name, value in section.items() if name != "partial_rotary_factor"}
    config, default = {
        "beside": ({"rope_parameters": bare, "partial_rotary_factor": 0.25}, 1.0),
        "inside": ({"rope_parameters": section}, 1.0),
        "inside-outranks": ({"rope_parameters": section, "partial_rotary_factor": 0.5}, 1.0),
        "default": ({"rope_parameters": bare}, 0.25),
    }[place]
    assert_same(table(config, default_fraction=default), expected)


def test_partial_rotation_of_no_object_and_of_a_family_without():
    rope = read_rope(ConfigReader(SIZES), 80, default_theta=1e4, default_fraction=0.4)
    assert rope == RopeParameters(1e4, 32)
    for fraction in (0.3, 1.5, 0.01):
        with pytest.raises(CheckpointError, match="partial_rotary_factor"):
            read_rope(ConfigReader(SIZES), 10, default_theta=1e4, default_fraction=fraction)
    section = {"rope_type": "default", "partial_rotary_factor": 0.5}
    with pytest.raises(CheckpointError, match=r"rope_parameters\.partial_rotary_factor"):
        table({"rope_parameters": section})


FOREIGN: dict[str, Any] = {
    "mrope_section": [2, 3, 3],
    "llama_4_scaling_beta": 0.1,
    "beta_fast": 32.0,
    "low_freq_factor": 1.0,
    "attention_factor": 1.5,
    "short_factor": [1.0] * 16,
}
OWN = {("yarn", "beta_fast"), ("yarn", "attention_factor"), ("longrope", "attention_factor"), ("yarn", "short_factor")}


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        (scheme, name)
        for scheme in SCHEMES
        for name in FOREIGN
        if name not in SCHEMES[scheme] and (scheme, name) not in OWN
    ],
)
def test_fields_of_other_schemes_are_refused(scheme, name):
    with pytest.raises(CheckpointError, match=rf"rope_scaling\.{name}"):
        table({"rope_scaling": {"rope_type": scheme, name: FOREIGN[name]} | SCHEMES[scheme]})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {"factor": 0}, "factor"),
    ("linear", {"factor": None}, "factor"),
    ("dynamic", {"factor": "4"}, "factor"),
    ("yarn", {"beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast"),
    ("yarn", {"attention_factor": -1.0}, "attention_factor"),
    ("yarn", {"truncate": 1}, "truncate"),
    ("yarn", {"mscale": "1"}, "mscale"),
    ("yarn", {"rope_theta": 1.0}, "rope_theta"),
    ("longrope", {"short_factor": [1.0] * 15}, "short_factor"),
    ("longrope", {"long_factor": [1.0] * 15 + [0.0]}, "long_factor"),
    ("longrope", {"long_factor": [1.0] * 15 + [True]}, "long_factor"),
    ("longrope", {"long_factor": None}, "long_factor"),
    ("longrope", {"original_max_position_embeddings": None}, "original_max_position_embeddings"),
    ("longrope", {"original_max_position_embeddings": 1}, "original_max_position_embeddings"),
    ("llama3", {"original_max_position_embeddings": None}, "original_max_position_embeddings"),
    ("llama3", {"high_freq_factor": 1.0}, "high_freq_factor"),
    ("linear", {"rope_type": "ntk"}, "rope_type"),
]


@pytest.mark.parametrize(("scheme", "changes", "name"), WRONG)
def test_wrong_values_are_named(scheme, changes, name):
    with pytest.raises(CheckpointError, match=rf"rope_parameters\.{name}") as caught:
        table({"rope_parameters": {"rope_type": scheme} | SCHEMES[scheme] | changes})
    assert caught.value.field == name


FULL, SLIDING = "full_attention", "sliding_attention"


def layer_ropes(config: dict[str, Any]) -> dict[str, RopeParameters]:
    reader = ConfigReader(SIZES | config)
    ropes = read_layer_ropes(reader, HEAD_DIM, {FULL: 1e6, SLIDING: 1e4}, own_base={SLIDING: "rope_local_base_freq"})
    reader.finish(inert=SIZES)
    return ropes


def test_kinds_of_layers_in_both_forms():
    yarn = {"rope_type": "yarn"} | SCHEMES["yarn"]
    old = layer_ropes({"rope_theta": 3000.0, "rope_local_base_freq": 50.0, "rope_scaling": yarn})
    new = layer_ropes(
        {
            "rope_parameters": {
                FULL: yarn | {"rope_theta": 3000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            }
        }
    )
    assert old == new
    assert (new[SLIDING], new[FULL].theta) == (RopeParameters(50.0, HEAD_DIM), 3000.0)
    expected = reference(yarn | {"rope_theta": 3000.0}, POSITIONS)
    assert_same(new[FULL].cos_sin(POSITIONS, POSITIONS), expected)
    assert layer_ropes({}) == {FULL: RopeParameters(1e6, HEAD_DIM), SLIDING: RopeParameters(1e4, HEAD_DIM)}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {FULL: {}}, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {FULL: {"rope_type": "default", "factor": 2.0}}}, "factor"),
    ],
)
def test_kinds_of_layers_that_are_not_the_models(config, name):
    with pytest.raises(CheckpointError, match=name):
        layer_ropes(config)


LENGTHS: list[tuple[str, dict[str, Any], int]] = [
    ("no scaling", {"max_position_embeddings": 4096}, 4096),
    (
        "vicuna 16k: linear states the original",
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4}},
        16384,
    ),
    (
        "dynamic states the original",
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.5}},
        5120,
    ),
    (
        "llama 3.1 states the scaled length",
        {"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3"} | SCHEMES["llama3"]},
        131072,
    ),
    (
        "phi 3 states the scaled length",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope"} | LISTS,
        },
        131072,
    ),
    (
        "deepseek v3 states yarn's scaled length",
        {
            "max_position_embeddings": 163840,
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        },
        163840,
    ),
    (
        "qwen 2.5 states yarn's original",
        {
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
    ),
    (
        "qwen 3 states a length of its own",
        {
            "max_position_embeddings": 40960,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        131072,
    ),
    (
        "yarn without an original",
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        8192,
    ),
    (
        "yarn's factor from the lengths",
        {
            "max_position_embeddings": 16384,
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 5000},
        },
        16384,
    ),
    (
        "gpt-oss",
        {
            "max_position_embeddings": 131072,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
                "rope_theta": 150000,
            },
        },
        131072,
    ),
]


@pytest.mark.parametrize(("config", "length"), [case[1:] for case in LENGTHS], ids=[case[0] for case in LENGTHS])
def test_the_longest_position_is_derived_once(config, length):
    rope = read_rope(ConfigReader(config), HEAD_DIM, default_theta=1e4)
    stated = config["max_position_embeddings"]
    assert derived_max_position(stated, [rope, None, rope]) == length
    assert derived_max_position(stated, [rope], is_scaled=True) == stated


@pytest.mark.parametrize(
    ("family", "scaling", "length"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}, 2048),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ("deepseek_v3", {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32}, 512),
        ("gpt_oss", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ("gemma2", {"rope_type": "dynamic", "factor": 2.0}, 1024),
    ],
)
def test_families_read_as_many_positions_as_their_scheme_gives(family, scaling, length):
    tiny = FAMILIES[family]
    config = dict(tiny.sizes) | {"architectures": [tiny.model], "rope_parameters": scaling}
    assert read_config(config).max_position == length


def test_gemma_3_states_the_scaled_length():
    config = dict(FAMILIES["gemma3"].sizes) | {"architectures": ["Gemma3ForCausalLM"]}
    assert config["rope_parameters"][FULL]["factor"] == 4.0
    assert read_config(config).max_position == config["max_position_embeddings"]


def test_unscaled_kinds_of_layers_do_not_shorten_the_others():
    ropes = layer_ropes({"rope_scaling": {"type": "linear", "factor": 8.0}})
    assert derived_max_position(4096, ropes.values()) == 32768
    assert derived_max_position(4096, [None]) == 4096
