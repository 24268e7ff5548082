"""What every pytest of an environment with Octavo loads: nothing, unless it is asked for the suite.

    pytest --pyargs octavo.conformance --backend NAME [--profile P] [--seed N] [--only X]
             └── then, and only then, pytest_suite.py with its options and fixtures

pytest reads the command line's options before it looks into the packages that are named there, so a conftest.py in this
package would come too late. Where Octavo is on the path but not installed: pytest -p octavo.conformance.pytest_plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PACKAGE = "octavo.conformance"


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    if PACKAGE in args:
        early_config.pluginmanager.import_plugin(f"{PACKAGE}.pytest_suite")
