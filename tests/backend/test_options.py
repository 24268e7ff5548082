"""`--backend-option key=value` pairs."""

from __future__ import annotations

import pytest

from octavo.core.backend.options import split_options
from octavo.core.base.errors import ConfigError


def test_pairs_are_split_at_the_first_equals_sign() -> None:
    assert split_options(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}


@pytest.mark.parametrize(("pairs", "message"), [(["a"], "key=value"), (["=1"], "key=value"), (["a=1", "a=2"], "twice")])
def test_a_malformed_pair_is_refused(pairs: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_options(pairs)
