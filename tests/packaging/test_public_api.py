"""`from octavo import …`: every public name is there, and nothing else pretends to be."""

import pytest

import octavo


@pytest.mark.parametrize("name", octavo.__all__)
def test_public_names_resolve(name):
    assert getattr(octavo, name) is getattr(octavo, name)


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'LLLM'"):
        octavo.LLLM  # noqa: B018


def test_dir_lists_the_public_names():
    assert dir(octavo) == sorted(octavo.__all__)
