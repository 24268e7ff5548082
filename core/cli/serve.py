"""Answer over HTTP as OpenAI's API does, until interrupted."""

from __future__ import annotations

import argparse

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.cli.flags import add_config_flags, add_model, engine_config, serve_config
from octavo.core.cli.interrupt import quiet_imports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, and every setting of the engine and the server."""
    add_model(parser, required=False)
    add_config_flags(parser, ServeConfig)
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Check the settings, then serve."""
    engine, server = engine_config(args), serve_config(args)
    with quiet_imports():
        from octavo.core.serve.launch import serve

    return serve(engine, server)
