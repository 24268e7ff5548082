"""Show every setting, its value and where the value came from."""

from __future__ import annotations

import argparse

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.options import options_of
from octavo.core.cli.flags import CONFIGS, add_config_flags, add_model, settings

SECRETS = ("api_key",)
"""Settings whose values are not for a screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of every command, so that a whole call can be explained."""
    add_model(parser, required=False)
    add_config_flags(parser, EngineConfig)
    add_config_flags(parser, ServeConfig)
    parser.add_argument("--verbose", action="store_true", help="also tell what each setting means and its variable")


def run(args: argparse.Namespace) -> int:
    """Print a table: name, value, source."""
    rows = [
        (item, found[name])
        for config_class in CONFIGS
        for found in [settings(config_class, args)]
        for name, item in options_of(config_class).items()
    ]
    width = max(len(item.name) for item, _ in rows)
    for item, setting in rows:
        value = "(open)" if setting.value is None else str(setting.value)
        if item.name in SECRETS and setting.value:
            value = f"({len(setting.value)} given)"
        print(f"{item.name:<{width}}  {value:<14}  {setting.source}")
        if args.verbose:
            print(f"{'':<{width}}  {item.help}\n{'':<{width}}  {item.flag}, {item.env}")
    return 0
