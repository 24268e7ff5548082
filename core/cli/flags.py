"""Flags made from the typed configuration, and the layers a value can come from.

    defaults  <  --config FILE  <  OCTAVO_* variables  <  flags

A flag that was not given is absent from the parsed arguments, so that it hides nothing below it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.base.config import EngineConfig, ServeConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.options import Kind, Option, options_of, read_environment, read_keys

CONFIGS: tuple[type, ...] = (EngineConfig, ServeConfig)
_MODEL_HELP = "a directory, a .gguf file, a Hugging Face id, or a demo name (smollm2, gemma3-270m, minilm)"


class Setting(NamedTuple):
    """A value and where it came from: "default", "FILE", "OCTAVO_X" or "--x"."""

    value: Any
    source: str


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the positional MODEL; where it is not required, --config or OCTAVO_MODEL may name it."""
    nargs = None if required else "?"
    default = None if required else argparse.SUPPRESS
    parser.add_argument("model", metavar="MODEL", nargs=nargs, default=default, help=_MODEL_HELP)


def add_config_flags(parser: argparse.ArgumentParser, config_class: type, *, skip: Sequence[str] = ()) -> None:
    """Add --config and a flag for each option of `config_class`, but for `model` and those in `skip`."""
    if config_class is EngineConfig:  # every command with settings has the engine's
        parser.add_argument("--config", metavar="FILE", help="a YAML file of settings; flags win over it")
    group = parser.add_argument_group("engine" if config_class is EngineConfig else "server")
    for item in options_of(config_class).values():
        if item.name not in ("model", *skip):
            _add_flag(group, item)


def _add_flag(group: argparse._ArgumentGroup, item: Option) -> None:
    text = item.help if item.default in (None, {}, ()) else f"{item.help} (default: {_shown(item.default)})"
    if item.kind is Kind.BOOL:
        group.add_argument(
            item.flag, dest=item.name, default=argparse.SUPPRESS, action=argparse.BooleanOptionalAction, help=text
        )
    elif item.kind in (Kind.MAP, Kind.LIST):
        metavar = "KEY=VALUE" if item.kind is Kind.MAP else "TEXT"
        group.add_argument(
            item.flag, dest=item.name, default=argparse.SUPPRESS, action="append", metavar=metavar, help=text
        )
    else:
        metavar = "|".join(item.choices) or {Kind.TEXT: "NAME", Kind.BYTES: "BYTES"}.get(item.kind, "N")
        group.add_argument(item.flag, dest=item.name, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _shown(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def settings(
    config_class: type, args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> dict[str, Setting]:
    """Every option of `config_class` with its value and source, from all layers.

    Raises:
        ConfigError: an unknown key or a wrong value, whichever layer it stands in.
    """
    known = options_of(config_class)
    result = {name: Setting(item.default, "default") for name, item in known.items()}
    path = getattr(args, "config", None)
    if path:
        result |= {name: Setting(value, path) for name, value in _read_file(path).items() if name in known}
    for name, value in read_environment(environ, _all_options()).items():
        if name in known:
            result[name] = Setting(value, known[name].env)
    for name, item in known.items():
        if hasattr(args, name):
            label = "MODEL" if name == "model" else item.flag
            result[name] = Setting(item.convert(getattr(args, name), label), label)
    return result


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The validated engine config that flags, variables and --config add up to."""
    config = EngineConfig(**{name: setting.value for name, setting in settings(EngineConfig, args).items()})
    config.validate()
    return config


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """The validated server config that flags, variables and --config add up to."""
    config = ServeConfig(**{name: setting.value for name, setting in settings(ServeConfig, args).items()})
    config.validate()
    return config


def engine_keywords(config: EngineConfig) -> dict[str, Any]:
    """A config as the keyword arguments of LLM."""
    return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}


def _read_file(path: str) -> dict[str, Any]:
    """The settings of a YAML file; it may hold those of the engine and of the server alike."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", field="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not a YAML file: {error}", field="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: give 'key: value' lines, one per setting", field="config")
    return read_keys(content, _all_options(), path)


def _all_options() -> dict[str, Option]:
    """The options of the engine and the server: a file or an environment may serve both."""
    return {name: item for config_class in CONFIGS for name, item in options_of(config_class).items()}
