"""EngineConfig: what it accepts, what it refuses and in which words."""

import dataclasses
from pathlib import Path

import pytest

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.options import Kind, options_of, read_environment


def test_defaults_are_valid_once_a_model_is_named():
    config = EngineConfig(model="some/model")
    config.validate()
    assert config.block_size == 16
    assert config.enable_prefix_caching


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").block_size = 32


@pytest.mark.parametrize(
    ("keys", "field", "words"),
    [
        ({}, "model", "model is missing"),
        ({"model": "m", "blok_size": 16}, "blok_size", "did you mean 'block_size'?"),
        ({"model": "m", "block_size": 0}, "block_size", "between 1 and 256"),
        ({"model": "m", "block_size": 257}, "block_size", "between 1 and 256"),
        ({"model": "m", "block_size": True}, "block_size", "a whole number"),
        ({"model": "m", "block_size": 16.5}, "block_size", "a whole number"),
        ({"model": "m", "block_size": None}, "block_size", "has no value"),
        ({"model": "m", "dtype": "flot32"}, "dtype", "did you mean 'float32'?"),
        ({"model": "m", "kv_memory_fraction": float("nan")}, "kv_memory_fraction", "between 0.01 and 0.95"),
        ({"model": "m", "kv_cache_memory_bytes": "2 GoB"}, "kv_cache_memory_bytes", "'2GiB'"),
        ({"model": "m", "enable_prefix_caching": "maybe"}, "enable_prefix_caching", "true or false"),
        ({"model": "m", "backend_options": "novalue"}, "backend_options", "KEY=VALUE"),
        ({"model": "m", "backend_options": 5}, "backend_options", "KEY=VALUE"),
        ({"model": 7}, "model", "a text"),
        ({"model": "m", "num_kv_blocks": 4, "kv_cache_memory_bytes": 1 << 20}, "num_kv_blocks", "give one of them"),
        ({"model": "m", "quantization": "int3"}, "quantization", "int3"),
        ({"model": "m", "tensor_parallel_size": 0}, "tensor_parallel_size", "between 1 and 1024"),
        ({"model": "m", "scheduling_policy": "lifo"}, "scheduling_policy", "fcfs, priority"),
    ],
)
def test_wrong_keys_are_refused_with_the_field_and_the_fix(keys, field, words):
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_keys(keys)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == field


def test_keys_may_be_text_paths_and_have_dashes():
    config = EngineConfig.from_keys(
        {
            "model": Path("some") / "folder",
            "kv-cache-memory-bytes": "1.5GiB",
            "max_num_seqs": "8",
            "strict-backend": "yes",
            "backend_options": ["isa=avx2", "pin = on"],
            "max_model_len": "none",
        }
    )
    assert config.model == str(Path("some") / "folder")
    assert config.kv_cache_memory_bytes == 3 << 29
    assert config.max_num_seqs == 8
    assert config.strict_backend is True
    assert config.backend_options == {"isa": "avx2", "pin": "on"}
    assert config.max_model_len is None


def test_text_in_a_typed_field_is_refused_by_validate():
    with pytest.raises(ConfigError, match="block_size is '16'; give 16"):
        EngineConfig(model="m", block_size="16").validate()


def test_resolve_fills_only_what_is_open():
    config = EngineConfig(model="m", max_model_len=100)
    resolved = config.resolve(max_model_len=8192, dtype="bfloat16", max_num_batched_tokens=512)
    assert (resolved.max_model_len, resolved.dtype, resolved.max_num_batched_tokens) == (100, "bfloat16", 512)
    assert config.dtype == "auto"


def test_resolve_checks_what_it_fills_in():
    with pytest.raises(ConfigError, match="max_model_len"):
        EngineConfig(model="m").resolve(max_model_len=0)


def test_environment_variables_are_generated_and_empty_ones_are_absent():
    known = options_of(EngineConfig)
    read = read_environment({"OCTAVO_MAX_NUM_SEQS": "4", "OCTAVO_DTYPE": "", "HOME": "/"}, known)
    assert read == {"max_num_seqs": 4}
    with pytest.raises(ConfigError, match="OCTAVO_MAX_NUM_SEQS is 'four'"):
        read_environment({"OCTAVO_MAX_NUM_SEQS": "four"}, known)


@pytest.mark.parametrize("name", ["OCTAVO_DTYP", "OCTAVO_MAX_NUM_SEQ", "OCTAVO_BLOCKSIZE"])
def test_a_misspelt_variable_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown variable '{name}'; did you mean 'OCTAVO_"):
        read_environment({name: "1"}, options_of(EngineConfig))


@pytest.mark.parametrize("name", ["OCTAVO_ACME_BOARD", "OCTAVO_CPU_ISA", "NOT_OCTAVO_DTYPE"])
def test_a_variable_of_somebody_else_is_left_alone(name):
    assert read_environment({name: "1"}, options_of(EngineConfig)) == {}


@pytest.mark.parametrize("config_class", [EngineConfig, ServeConfig])
def test_every_option_has_help_and_a_default_of_its_own_kind(config_class):
    for item in options_of(config_class).values():
        assert item.help
        assert item.help[0].islower()
        assert not item.help.endswith(".")
        if item.default is not None:
            assert item.convert(item.default) == item.default
        if item.kind is Kind.BOOL:
            assert isinstance(item.default, bool)


def test_server_port_range():
    ServeConfig(port=0).validate()
    with pytest.raises(ConfigError, match="between 0 and 65535"):
        ServeConfig(port=70000).validate()
