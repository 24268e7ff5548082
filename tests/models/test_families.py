"""Every family equals Hugging Face: logits at each position, whole and in chunks, and greedy tokens."""

from __future__ import annotations

import pytest

from octavo.core.models import registry
from octavo.core.models.decoder.model import DecoderModel
from tests.fakes import tiny_models
from tests.fakes.families import FAMILIES
from tests.models.step_runner import relative_error

TOLERANCE = 1e-4
LENGTHS = (1, 17, 200)
CHUNKS = (7, 64)
NUM_GREEDY = 24
CASES = [
    pytest.param(tiny, changes, id=f"{family}-{variant}")
    for family, tiny in FAMILIES.items()
    for variant, changes in {"base": {}, **tiny.variants}.items()
    if tiny.model in registry.FAMILIES
]


@pytest.mark.parametrize(("tiny", "changes"), CASES)
def test_a_family_equals_hugging_face(tiny, changes, runner_of):
    model = tiny.make(**changes)
    runner = runner_of(model)
    for length in LENGTHS:
        prompt = tiny_models.random_prompt(runner.vocab_size, length)
        expected = tiny_models.logits_of(model, prompt)
        for chunk in (length, *(chunk for chunk in CHUNKS if chunk < length)):
            assert relative_error(runner.prompt("prompt", prompt, chunk), expected) < TOLERANCE, (length, chunk)
            runner.finish("prompt")
    prompt = tiny_models.random_prompt(runner.vocab_size, 17)
    assert runner.greedy("greedy", prompt, NUM_GREEDY, chunk=9) == tiny_models.greedy(model, prompt, NUM_GREEDY)


def test_every_decoder_of_the_registry_has_a_tiny_model():
    decoders = {name for name, family in registry.FAMILIES.items() if family.build is DecoderModel}
    assert {tiny.model for tiny in FAMILIES.values()} == decoders
