"""A model that is split over ranks gives the logits and tokens of the whole one, whatever is cut, shared or padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.backends.cpu.device import CpuBackend
from octavo.core.backend import BackendConfig
from octavo.core.base.errors import ConfigError
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.models import registry
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.models.rank_runner import RankRunner
from tests.models.step_runner import relative_error

TOLERANCE = 1e-4
DECODERS = [name for name, tiny in FAMILIES.items() if tiny.model in registry.FAMILIES]
CASES = [(family, variant) for family in DECODERS for variant in ("base", *FAMILIES[family].variants)]

Split = Callable[..., RankRunner]


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    """Saves a Hugging Face model and loads it over ranks."""
    made: list[RankRunner] = []

    def make(model: torch.nn.Module, size: int, **options: Any) -> RankRunner:
        directory = tiny_models.save(model, tmp_path / "model")
        checkpoint = open_checkpoint(ModelSource("tiny", directory, "safetensors"))
        try:
            made.append(RankRunner(checkpoint, size, **options))
        finally:
            checkpoint.close()
        return made[-1]

    yield make
    for runner in made:
        runner.close()


def check(runner: RankRunner, model: torch.nn.Module) -> None:
    """Logits at each position, whole and in chunks, and greedy tokens equal Hugging Face's."""
    prompt = tiny_models.random_prompt(runner.vocab_size, 40)
    expected = tiny_models.logits_of(model, prompt)
    for chunk in (40, 9):
        assert relative_error(runner.prompt("prompt", prompt, chunk), expected) < TOLERANCE, chunk
        runner.finish("prompt")
    assert runner.greedy("greedy", prompt[:5], 8) == tiny_models.greedy(model, prompt[:5], 8)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_every_family_over_two_ranks(family: str, variant: str, split: Split) -> None:
    tiny = FAMILIES[family]
    model = tiny.make(**tiny.variants.get(variant, {}))
    runner = split(model, 2)
    check(runner, model)
    assert runner.group.calls > 0


@pytest.mark.parametrize("family", DECODERS)
def test_every_family_over_two_ranks_on_the_cpus_kernels(family: str, split: Split) -> None:
    model = FAMILIES[family].make()
    check(split(model, 2, make_backend=lambda: CpuBackend(BackendConfig(num_threads=1))), model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_may_be_shared_out_whole(family: str, split: Split) -> None:
    experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}[family]
    model = FAMILIES[family].make(**{experts: 8})
    runner = split(model, 2, expert_parallel=True)
    check(runner, model)


FOUR = {
    "kv-heads-shared": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "one-kv-head": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "kv-heads-split": {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "vocabulary-padded": {"num_attention_heads": 4, "vocab_size": 197},
    "vocabulary-padded-and-tied": {"num_attention_heads": 4, "vocab_size": 202, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(case: str, split: Split) -> None:
    model = tiny_models.make_llama(**FOUR[case])
    check(split(model, 4), model)


def test_a_tied_head_with_values_of_its_own_is_used_on_every_rank(split: Split, tmp_path: Path) -> None:
    """vllm#5621: a real lm_head under a flag that says tied."""
    model = tiny_models.make_llama(num_attention_heads=4)
    model.config.tie_word_embeddings = True  # the flag alone: the checkpoint holds both
    check(split(model, 2), model)


@pytest.mark.parametrize(
    ("family", "changes", "options", "names"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1}, {}, "num_attention_heads, 3"),
        ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3}, {}, "num_key_value_heads, 3"),
        ("llama", {"intermediate_size": 41}, {}, "intermediate_size, 41"),
        ("llama", {"vocab_size": 1}, {}, "vocab_size, 1"),
        ("mixtral", {"num_local_experts": 5}, {"expert_parallel": True}, "num_experts, 5"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(
    family: str, changes: dict[str, Any], options: dict[str, Any], names: str, split: Split
) -> None:
    """vllm#52435, vllm-ascend#5311 (experts), and whatever else is shared out."""
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is 2, which can't split {names}") as error:
        split(FAMILIES[family].make(**changes), 2, **options)
    assert error.value.field == "tensor_parallel_size"
