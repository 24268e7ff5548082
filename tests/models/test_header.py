"""A config that speaks of another model than the files hold is refused before anything is built for it."""

from __future__ import annotations

import json

import pytest

from octavo import LLM
from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import CheckpointError, ConfigError
from octavo.core.engine.plan import plan_model
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 48 * 10**12),
        ("vocab_size", 10**15),
        ("num_hidden_layers", 20_000),
        ("num_hidden_layers", 4),
        ("num_hidden_layers", 10**15),
        ("num_hidden_layers", 7_000),
        ("intermediate_size", 10**12),
        ("intermediate_size", 10**9),
        ("head_dim", 10**12),
        ("num_key_value_heads", 10**12),
    ],
)
@pytest.mark.parametrize("use", [lambda path: plan_model(EngineConfig(model=path)), LLM], ids=["plan", "LLM"])
def test_sizes_that_the_files_do_not_have(tmp_path, field, value, use):
    directory = tiny_models.save(tiny_models.make_llama(tie_word_embeddings=False), tmp_path)
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"head_dim": 8}
    file.write_text(json.dumps(config | {field: value}))
    with pytest.raises(CheckpointError) as caught:
        use(str(directory))
    assert str(value) in str(caught.value)


@pytest.mark.parametrize("field", ["head_dim", "num_attention_heads"])
def test_heads_wider_than_any_tensor(tmp_path, field):
    directory = tiny_models.save(tiny_models.make_llama(), tmp_path)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 8} | {field: 6 * 10**8}))
    with pytest.raises(CheckpointError, match="no tensor is longer than 199"):
        LLM(str(directory))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", [2, None], {"a": 1}, 10**40, 1.5, True])
def test_an_end_of_reply_that_is_no_token(tmp_path, name, value):
    directory = tiny_models.save(tiny_models.make_llama(), tmp_path)
    file = directory / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=f"{name}: eos_token_id is"):
        LLM(str(directory))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_more_choices_than_experts(tmp_path, family):
    directory = tiny_models.save(FAMILIES[family].make(), tmp_path)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_experts_per_tok": 99}))
    with pytest.raises(CheckpointError, match="num_experts_per_tok"):
        plan_model(EngineConfig(model=str(directory)))


def test_experts_are_not_shared_out_where_there_are_none(tmp_path):
    directory = tiny_models.save(tiny_models.make_llama(), tmp_path)
    with pytest.raises(ConfigError, match="no experts"):
        LLM(str(directory), expert_parallel=True)


def test_heads_that_ranks_cannot_share_start_no_rank(tmp_path, monkeypatch):
    directory = tiny_models.save(tiny_models.make_llama(), tmp_path)
    monkeypatch.setattr("octavo.core.engine.multiproc.MultiprocExecutor", None)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        LLM(str(directory), tensor_parallel_size=64)


@pytest.mark.parametrize("field", ["factor", "beta_fast"])
def test_numbers_with_which_nothing_can_be_computed(tmp_path, field):
    directory = tiny_models.save(FAMILIES["gpt_oss"].make(), tmp_path)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"][field] = 1e308
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{field} is 1e[+]308; it must be a number above 0, at most 1e[+]15"):
        LLM(str(directory))
