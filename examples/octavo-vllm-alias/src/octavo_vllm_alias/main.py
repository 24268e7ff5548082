"""`vllm …` becomes `octavo …`: in the same process, so that signals, exit codes and process ids are Octavo's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from octavo_vllm_alias.calls import COMMANDS
from octavo_vllm_alias.table import load_table
from octavo_vllm_alias.translate import BadCall

USAGE = """usage: vllm COMMAND [ARGUMENTS]

This is Octavo under another command's name. Flags are those of vLLM; what becomes of each stands in docs/vllm-flags.md.

commands: serve, chat, complete, bench serve, run-batch
"""


def main(words: Sequence[str] | None = None) -> int:
    """Translate a call and become `octavo`; returns only where there is nothing to become."""
    words = list(sys.argv[1:] if words is None else words)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(USAGE)
        return 0 if words else 2
    if words[0] in ("-v", "--version"):
        sys.stdout.write(f"octavo {version('octavo')}, with the flags of vLLM {load_table().version}\n")
        return 0
    try:
        call = _find(words)
    except BadCall as error:
        sys.stderr.write(f"vllm (octavo): error: {error}\n")
        return 2
    if call is not None:
        octavo, variables = call
        # -P: nothing that lies where the command is given is taken for a part of Octavo.
        os.execvpe(sys.executable, [sys.executable, "-P", "-m", "octavo", *octavo], {**os.environ, **variables})
    return 0


def _find(words: Sequence[str]) -> tuple[list[str], dict[str, str]] | None:
    """Octavo's words and variables; None where help was all that was asked."""
    for name, translate in COMMANDS.items():
        if tuple(words[: len(name)]) == name:
            rest = words[len(name) :]
            if any(word in ("-h", "--help") or word.startswith("--help=") for word in rest):
                known = " ".join(flag.name for flag in load_table().flags if flag.fate == "taken")
                sys.stdout.write(
                    f"usage: vllm {' '.join(name)} …\n\nFlags of serve that mean something here: {known}\n"
                )
                return None
            call = translate(rest, os.environ)
            for note in call.notes:
                sys.stderr.write(f"vllm (octavo): {note}\n")
            return call.words, call.variables
    known = ", ".join(" ".join(name) for name in COMMANDS)
    raise BadCall(f"there is no command {words[0]!r} here; there are {known}")
