"""An argument parser whose errors are one line, and which offers the nearest name for an unknown flag."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from octavo.core.base.errors import ConfigError
from octavo.core.base.names import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse with UserErrors in place of usage dumps, and no guessing at abbreviated flags."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog=prog, description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`; flags and positional arguments may be mixed.

        Raises:
            ConfigError: an unknown flag, a missing or surplus argument, a value of the wrong kind.
        """
        args, surplus = self.parse_known_intermixed_args(list(words))
        for word in surplus:
            if word.startswith("-") and word != "-":
                flags = [flag for action in self._actions for flag in action.option_strings]
                raise ConfigError(f"unknown flag {word!r}{did_you_mean(word.split('=')[0], flags)}")
        if surplus:
            raise ConfigError(f"unexpected argument {surplus[0]!r}; see {self.prog} --help")
        return args

    def format_usage(self) -> str:
        """The call in one line: argparse would list every flag here and again below."""
        words = [action.metavar or action.dest for action in self._actions if not action.option_strings]
        return f"usage: {self.prog} {' '.join(map(str, words))} [FLAGS]\n"

    def format_help(self) -> str:
        """Usage, description, and every argument."""
        self.usage = self.format_usage().removeprefix("usage: ").rstrip()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """What argparse calls when a call is wrong: one line, in place of the usage text."""
        raise ConfigError(f"{message}; see {self.prog} --help")
