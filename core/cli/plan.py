"""Tell what fits in memory: weights, KV bytes per token, and how many requests of which length. Loads no weights."""

from __future__ import annotations

import argparse

from octavo.core.base.config import EngineConfig
from octavo.core.cli.flags import add_config_flags, add_model, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and every setting of the engine."""
    add_model(parser, required=False)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    config = engine_config(args)
    from octavo.core.engine.plan import plan_model

    print(plan_model(config))
    return 0
