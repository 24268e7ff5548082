"""docs/add-a-backend.md is executed: from an environment that holds Octavo alone to a green `smoke` on the new package.

Each ```console block of the guide is a row of "$ command" lines, each followed by lines that it prints; "…" stands for
lines left out, and numbers may differ. Nothing outside the new package is edited.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.packaging.isolated import ROOT, Environment

GUIDE = ROOT / "docs" / "add-a-backend.md"
PAGE = GUIDE.read_text(encoding="utf-8")


def console(page: str) -> list[tuple[str, list[str]]]:
    """(command, lines it printed) in the page's order."""
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line.removeprefix("$ "), []))
            elif line.strip() != "…":
                steps[-1][1].append(line)
    return steps


def normal(line: str) -> str:
    """A line without what differs from run to run: numbers, the worst case, and how far columns lie apart."""
    without_cases = re.sub(r"\b[\w.]+/[\w.+-]+", "CASE", line)
    return " ".join(re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", without_cases).split())


@pytest.mark.timeout(600)
def test_the_guides_commands_lead_to_a_green_smoke(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    before = set(environment.folder.iterdir())
    steps = console(PAGE)
    for command, printed in steps:
        done = environment.run(command)
        assert done.returncode == (1 if "NOT met" in "".join(printed) else 0), f"$ {command}\n{done.stdout}"
        lines = {normal(line) for line in done.stdout.splitlines()}
        for line in printed:
            assert normal(line) in lines, f"$ {command}\nis said to print:\n{line}\nand prints:\n{done.stdout}"
    assert "profile smoke: met" in [line for _, printed in steps for line in printed]
    made = {path.name for path in set(environment.folder.iterdir()) - before}
    assert {name for name in made if not name.startswith(".")} == {"octavo-myaccel"}  # pytest leaves its caches


def test_no_command_of_the_guide_writes_outside_the_new_package() -> None:
    for command, _ in console(PAGE):
        for word in shlex.split(command):
            assert not word.startswith(("/", "..", "~")), command


def test_the_guide_names_only_what_there_is() -> None:
    for name in re.findall(r"`((?:examples|docs|src|tests)/[\w./-]+)`", PAGE):
        if "octavo_myaccel" not in name and name != "tests/test_backend.py":
            assert (ROOT / name).exists(), name


@pytest.mark.skipif(os.environ.get("OCTAVO_NIGHTLY") != "1", reason="minutes; `make nightly`")
@pytest.mark.timeout(3600)
def test_what_the_guide_leads_to_passes_core(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    for command, _ in console(PAGE):
        if not command.startswith(("octavo conform", "python")):
            environment.checked(command)
    environment.checked("octavo conform --backend myaccel --profile core --timeout 600", timeout_s=3600)
