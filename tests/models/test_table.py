"""docs/models.md says what the registry holds and what is tested."""

from __future__ import annotations

from tests.models import table


def test_the_page_is_fresh():
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), "run python -m tests.models.table --write"
