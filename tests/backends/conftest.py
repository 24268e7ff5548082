"""Triton's kernels run in its interpreter in all tests below this folder.

Triton decides when it is imported, and again when a kernel's module is: so the variable is set before the modules of
these tests are collected, and no other test of this process imports triton. It is gone again when all tests are
collected, so that others (and the processes that they start) see backends as they are without it; while a test below
this folder runs it is back. What has to compile runs in a process of its own, without the variable.
"""

from __future__ import annotations

import os
import sys

import pytest

VARIABLE = "TRITON_INTERPRET"

assert "triton" not in sys.modules or os.environ.get(VARIABLE) == "1", (
    "triton was imported before the tests of GPU backends were collected; it must not be, on the CPU path"
)
_before = os.environ.get(VARIABLE)
os.environ[VARIABLE] = "1"

import triton  # noqa: E402, F401 - now, while the variable is set


def pytest_collection_finish() -> None:
    if _before is None:
        os.environ.pop(VARIABLE, None)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes and kernels' modules that a test imports see the interpreter."""
    monkeypatch.setenv(VARIABLE, "1")
