"""An environment of its own for a package under test: Octavo and its dependencies are there, and nothing else.

A virtual environment without pip, whose one .pth file names this interpreter's site-packages and the tree's src: a copy
of torch per test would cost gigabytes. What is installed goes into the environment alone and ends with it.
"""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Environment:
    """One environment and the folder in which its commands run.

    Attributes:
        folder: the working directory, empty at first.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / "work"
        self.folder.mkdir()
        home = root / "venv"
        venv.create(home, symlinks=True, with_pip=False)
        self._bin = home / "bin"
        site = next((home / "lib").glob("python*/site-packages"))
        (site / "octavo-tests.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_paths()['purelib']}\n")
        for name, module in (("octavo", "octavo.core.cli.main"), ("pip", "pip")):
            script = self._bin / name
            script.write_text(f'#!/bin/sh\nexec "{self._bin / "python"}" -m {module} "$@"\n')
            script.chmod(0o755)

    def run(self, command: str, *, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a shell command; never raises for its exit code. stdout and stderr come together, as on a terminal."""
        return subprocess.run(
            command, shell=True, cwd=self.folder, env=self._environ(), timeout=timeout_s, check=False, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command of the environment; the caller ends it."""
        return subprocess.Popen(
            [str(self._bin / words[0]), *words[1:]], cwd=self.folder, env=self._environ(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def checked(self, command: str, **options: float) -> str:
        """Run a command that must succeed, and return what it printed."""
        done = self.run(command, **options)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}"
        return done.stdout

    def _environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OCTAVO", "PIP"))}
        own = {"PATH": f"{self._bin}:{os.environ['PATH']}", "VIRTUAL_ENV": str(self._bin.parent), "NO_COLOR": "1"}
        return kept | own | {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
