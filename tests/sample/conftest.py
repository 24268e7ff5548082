"""A sampler over the reference draw, and rows built the short way."""

import pytest

from octavo.core.backend.reference_sample import sample_reference
from octavo.core.base.params import SamplingParams
from octavo.core.sample.sampler import Sampler
from octavo.core.sample.state import SamplingRow


def reference_draw(*arguments, out):
    out.copy_(sample_reference(*arguments))


@pytest.fixture
def sampler():
    return Sampler(reference_draw)


@pytest.fixture
def row():
    """row(prompt=…, outputs=…, choice=…, ends=…, **params): a SamplingRow; greedy unless told otherwise."""

    def make(prompt=(), outputs=(), choice=0, ends=(), **params):
        fields = {"temperature": 0.0, "seed": 0, "max_tokens": 1000} | params
        return SamplingRow(SamplingParams(**fields), list(prompt), outputs, choice=choice, end_token_ids=ends)

    return make
