"""Every field of every family's config means what it means to Hugging Face, or is refused, or is known to be inert.

A tiny model is saved once; then one field of its config.json is changed at a time, and both sides load the directory:

    ours refuses the config or the weights                    fine: nothing wrong is computed
    Hugging Face can't load it                                ours must refuse as well
    both load, and Hugging Face's logits changed              ours must equal them
    both load, and Hugging Face's logits are what they were   so must ours be, and the table says why

So a field that we read and misunderstand shows, and one that we pass over without a reason shows too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.base.errors import UserError
from octavo.core.load.checkpoint import ModelSource, open_checkpoint
from octavo.core.models import registry
from octavo.core.models.config import INERT
from octavo.core.models.families.llama import read_llama
from tests.fakes import tiny_encoders, tiny_models
from tests.fakes.families import FAMILIES, SLIDING
from tests.fakes.tiny_family import TinyFamily
from tests.models.step_runner import ReferenceBackend, StepRunner, load_model, relative_error
from tests.models.text_runner import TextRunner

TOLERANCE = 5e-5
VISIBLE = 2e-4
"""A change of logits, relative to their spread, that no tolerance hides."""
LENGTH = 80
"""Tokens of the prompt: beyond every window and original length of the table."""
UNSEEN = {
    "max_position_embeddings": "a limit of lengths, without a scaling that reads it",
    "tie_word_embeddings": "a checkpoint that has a head has it, whatever the flag says",
}
"""Fields that may change nothing in any family, since others decide; they are compared all the same."""

TABLE = {**FAMILIES, **tiny_encoders.ENCODERS}
CASES = [
    pytest.param(tiny, changes, id=f"{family}-{variant}")
    for family, tiny in TABLE.items()
    for variant, changes in {"base": {}, **tiny.variants}.items()
]

IF_NONE: Mapping[str, tuple[Any, ...]] = {
    "head_dim": (16,),
    "sliding_window": (8,),
    "num_experts_per_tok": (2,),
    "q_lora_rank": (16,),
    "use_bidirectional_attention": (True,),
}
"""What a field that is null is changed to; 2 where nothing is said."""
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "gelu", "relu"),
    "hidden_activation": ("silu", "gelu", "relu"),
    "rope_type": ("default", "linear", "yarn"),
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "num_key_value_heads": (1, 2, 4),
    "original_max_position_embeddings": (24,),
}
"""Values that a field is changed to in place of the usual ones; its present one is left out."""
SCHEMES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
)
"""Scalings that every rotary object is changed to as a whole; dynamic ones beside a max_position_embeddings of 32."""


@dataclass(frozen=True)
class Saved:
    """A tiny model on disk, its config.json, and Hugging Face's logits of one prompt (of an encoder: its rows)."""

    tiny: TinyFamily
    directory: Path
    config: dict[str, Any]
    prompt: list[int]
    logits: torch.Tensor

    @classmethod
    def make(cls, tiny: TinyFamily, changes: Mapping[str, Any], directory: Path) -> Saved:
        model = tiny.make(**changes)
        tiny_models.save(model, directory)
        config = json.loads((directory / "config.json").read_text())
        prompt = tiny_encoders.random_text(model.config, LENGTH)
        return cls(tiny, directory, config, prompt, output_of(model, prompt))

    def write(self, config: Mapping[str, Any]) -> None:
        (self.directory / "config.json").write_text(json.dumps(config))

    def ours(self) -> torch.Tensor | None:
        """Our logits for what is on disk; None where it is refused."""
        backend = ReferenceBackend()
        try:
            if self.tiny.is_encoder:
                return TextRunner(self.directory, backend, LENGTH).rows([self.prompt])[0]
            checkpoint = open_checkpoint(ModelSource("tiny", self.directory, "safetensors"))
            try:
                model, opset = load_model(checkpoint, backend, max_model_len=LENGTH)
            finally:
                checkpoint.close()
        except UserError:
            return None
        return StepRunner(model, backend, opset).prompt("a", self.prompt)

    def reference(self) -> torch.Tensor | None:
        """Hugging Face's logits for what is on disk; None where it can't load or run it as it is."""
        import transformers

        try:
            model, info = getattr(transformers, self.tiny.model).from_pretrained(
                self.directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
            )
            return None if info["missing_keys"] else output_of(model, self.prompt)
        except Exception:  # whatever it raises, from validation to shapes in the middle of a product
            return None


def output_of(model: torch.nn.Module, prompt: list[int]) -> torch.Tensor:
    """Hugging Face's logits at every position, or hidden rows where there is no head."""
    is_headless = type(model).__name__.endswith("Model")
    return tiny_encoders.rows_of(model, prompt) if is_headless else tiny_models.logits_of(model, prompt)


@pytest.fixture(autouse=True)
def quiet_loading(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No report, no warning and no progress bar of each of many loads."""
    from transformers.utils import logging

    caplog.set_level("ERROR")
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(before)


def mutations(config: Mapping[str, Any], tiny: TinyFamily) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(field, what it became, changed config), one field at a time."""
    for name, value in config.items():
        if isinstance(value, dict):
            for inner, shown, changed in mutations(value, tiny):
                yield f"{name}.{inner}", shown, {**config, name: changed}
            if "rope_type" in value:
                for scheme in SCHEMES:
                    changed = {"rope_theta": value["rope_theta"]} | scheme
                    if "partial_rotary_factor" in value:
                        changed["partial_rotary_factor"] = value["partial_rotary_factor"]
                    beside = {"max_position_embeddings": 32} if scheme["rope_type"] == "dynamic" else {}
                    yield name, str(scheme), {**config, name: changed, **beside}
            continue
        for other in other_values(name, value, tiny):
            yield name, repr(other), {**config, name: other}


def other_values(name: str, value: Any, tiny: TinyFamily) -> list[Any]:
    """What a field is changed to."""
    hints = tiny.others.get(name) or OTHERS.get(name) or (IF_NONE.get(name, (2,)) if value is None else None)
    if hints is not None:
        return [hint for hint in hints if hint != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, float):
        return [3 * value or 0.5]
    if isinstance(value, str):
        return [SLIDING if "attention" in value and value != SLIDING else "full_attention"]
    if isinstance(value, list) and value:
        return [[other, *value[1:]] for other in other_values(name, value[0], tiny)]
    return [[1]]


@pytest.mark.parametrize(("tiny", "changes"), CASES)
def test_every_field_is_equal_refused_or_inert(tiny, changes, tmp_path):
    saved = Saved.make(tiny, changes, tmp_path)
    assert (first := saved.ours()) is not None
    assert relative_error(first, saved.logits) < TOLERANCE
    wrong = []
    for name, shown, config in mutations(saved.config, tiny):
        if (name in INERT and name not in tiny.matters) or name in tiny.inert or name in tiny.exempt:
            continue
        saved.write(config)
        if fault := judge(saved, may_be_unseen=name in UNSEEN or name in tiny.unseen):
            wrong.append(f"{name} = {shown}: {fault}")
    assert not wrong, "\n".join(wrong)


def judge(saved: Saved, *, may_be_unseen: bool) -> str | None:
    """What is wrong with how we take the config on disk; None: nothing."""
    try:
        found = saved.ours()
    except Exception as error:
        return f"we fail without naming the field: {error!r}"
    if found is None:
        return None
    expected = saved.reference()
    if expected is None:
        return "Hugging Face can't load it, and we can"
    if expected.shape != found.shape or (error := relative_error(found, expected)) >= TOLERANCE:
        return f"our logits are not Hugging Face's, by {error}"
    if not may_be_unseen and relative_error(expected, saved.logits) < VISIBLE:
        return "it changes no logits: refuse it, or give the reason why it is inert"
    return None


@pytest.mark.parametrize(("tiny", "changes"), CASES)
def test_inert_fields_change_nothing(tiny, changes, tmp_path):
    saved = Saved.make(tiny, changes, tmp_path)
    for name, shown, config in mutations(saved.config, tiny):
        if name in ("architectures", "model_type", *tiny.matters) or name not in {*INERT, *tiny.inert}:
            continue
        saved.write(config)
        assert (found := saved.ours()) is not None, (name, shown)
        assert relative_error(found, saved.logits) < TOLERANCE, (name, shown)
        if name in tiny.inert:
            assert (expected := saved.reference()) is not None, (name, shown)
            assert relative_error(expected, saved.logits) < TOLERANCE, (name, shown)


def faults(reader: Callable[[dict[str, Any]], Any], name: str, value: Any, tmp_path: Path, monkeypatch: Any) -> str:
    """What `judge` says of a llama whose config is read by `reader`, with one field changed."""
    saved = Saved.make(FAMILIES["llama"], {}, tmp_path)
    monkeypatch.setitem(registry.FAMILIES, "LlamaForCausalLM", registry.Family("llama", reader))
    saved.write(saved.config | {name: value})
    return judge(saved, may_be_unseen=False) or ""


def test_a_field_that_is_misread_is_found(tmp_path, monkeypatch):
    def fixed_eps(values: dict[str, Any]) -> Any:
        return read_llama(values | {"rms_norm_eps": 1e-3})

    assert "our logits are not" in faults(fixed_eps, "rms_norm_eps", 3e-3, tmp_path, monkeypatch)


def test_a_field_that_is_passed_over_is_found(tmp_path, monkeypatch):
    def careless(values: dict[str, Any]) -> Any:
        return read_llama({name: value for name, value in values.items() if name != "embedding_multiplier"})

    assert "it changes no logits" in faults(careless, "embedding_multiplier", 3.0, tmp_path, monkeypatch)


def test_lists_of_exceptions_name_real_fields():
    for tiny in TABLE.values():
        config = tiny.make().config.to_dict()
        listed = {*tiny.inert, *tiny.exempt, *tiny.unseen}
        assert {name.split(".")[0] for name in listed} <= set(config), tiny.model
        assert not listed & set(INERT), tiny.model
