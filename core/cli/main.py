"""`octavo`: finds the command, runs it, and turns what goes wrong into one line and an exit code.

    octavo COMMAND …  ──►  COMMANDS[name]  ──►  octavo.core.cli.<module>   add_arguments(parser), run(args) -> int

Only the chosen command's module is imported, and none imports torch before it runs: every `--help` stays quick.
Exit codes: 0 done, 1 something failed on the way, 2 the call was wrong, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.base.errors import ConfigError, OctavoError, UserError
from octavo.core.base.names import did_you_mean
from octavo.core.cli.interrupt import INTERRUPTED, quiet_imports

READER_GONE = 141


class Command(NamedTuple):
    """A command's module under octavo.core.cli and its line in the overview. A name may have two words."""

    module: str
    help: str


COMMANDS = {
    "run": Command("run", "answer a prompt, or chat, in this terminal"),
    "serve": Command("serve", "answer over HTTP as OpenAI's API does"),
    "chat": Command("chat", "talk with a model that is being served"),
    "complete": Command("complete", "continue a text with a model that is being served"),
    "run-batch": Command("run_batch", "answer a file of requests, without a server"),
    "plan": Command("plan", "tell what fits in memory, before loading anything"),
    "bench": Command("bench", "measure throughput or latency"),
    "bench serve": Command("bench_serve", "measure a server under load"),
    "backends": Command("backends", "list the device backends, and why one can't run here"),
    "backend": Command("backend", "begin a backend of your own"),
    "conform": Command("conform", "tell whether a backend's numbers are right"),
    "tune": Command("tune", "search a backend's launch parameters on the device that is here"),
    "doctor": Command("doctor", "check this machine and say what to mend"),
    "explain-config": Command("explain_config", "show every setting, its value and where it came from"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the arguments after the program's name; sys.argv's by default.

    Returns:
        The process's exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        return _dispatch(words)
    except UserError as error:
        return _fail(error, 2)
    except OctavoError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone: leave nothing for the interpreter to flush into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE


def _open_standard_streams() -> None:
    """Where whoever started us closed stdin, stdout or stderr: else a socket gets its number, and what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode))


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0 if words else 2
    count = 2 if " ".join(words[:2]) in COMMANDS else 1
    name, rest = " ".join(words[:count]), words[count:]
    if name == "--version":
        from octavo import __version__

        print(f"octavo {__version__}")
        return 0
    if name not in COMMANDS:
        what = "flag" if name.startswith("-") else "command"
        raise ConfigError(f"unknown {what} {name!r}{did_you_mean(name, [*COMMANDS, '--help', '--version'])}")
    with quiet_imports():
        from octavo.core.cli.parser import Parser

        command = importlib.import_module(f"octavo.core.cli.{COMMANDS[name].module}")
    parser = Parser(prog=f"octavo {name}", description=command.__doc__)
    command.add_arguments(parser)
    args = parser.parse(rest)
    _log_to_stderr()
    code: int = command.run(args)
    sys.stdout.flush()  # a closed pipe shows here, where it can still be handled
    return code


def _log_to_stderr() -> None:
    """Show what Octavo has to say (which backend it chose, what runs slowly), and only warnings of libraries."""
    import logging

    from octavo.core.base.logs import log_to_stderr

    log_to_stderr(logging.INFO)


def _overview() -> str:
    rows = "\n".join(f"  {name:<16}{command.help}" for name, command in COMMANDS.items())
    return (
        "usage: octavo COMMAND [ARGUMENTS]\n\n"
        "Octavo runs and serves large language models on whatever device is there.\n\n"
        f"commands:\n{rows}\n\n"
        "octavo COMMAND --help tells more; octavo --version tells the version."
    )


def _fail(error: OctavoError, code: int) -> int:
    import logging

    from octavo.core.base.logs import announce

    announce(f"error: {' '.join(str(error).split())}", logging.ERROR)
    return code


if __name__ == "__main__":
    sys.exit(main())
