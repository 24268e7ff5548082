"""List the device backends, and why one can't run here.

With --ops MODEL, load the model on the chosen backend, generate a few tokens, and tell what ran each of its ops: the
backend's own kernel, a composite of its kernels, or a fallback to plain torch, with the reason and the number of calls.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.cli.flags import add_config_flags, engine_config, engine_keywords

if TYPE_CHECKING:
    from octavo.core.backend.opset import OpChoice
    from octavo.core.backend.specs import OpSpec

TRIAL_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--ops and, for it, every setting of the engine."""
    parser.add_argument(
        "--ops", dest="model", metavar="MODEL", default=argparse.SUPPRESS, help="tell what runs each op"
    )
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Print the table; exit 0 although some backends may refuse: that is an answer."""
    if hasattr(args, "model"):
        _print_ops(engine_config(args))
    else:
        given = [name for name in vars(args) if name != "config"]
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')} needs --ops MODEL", field=given[0])
        _print_backends()
    return 0


def _print_backends() -> None:
    from octavo.core.backend.registry import Available, BackendRegistry

    registry = BackendRegistry.discover()
    infos = registry.infos()
    width = max((len(info.name) for info in infos), default=0)
    auto_taken = False
    for info in infos:
        answer = registry.probe(info.name)
        if isinstance(answer, Available):
            is_auto = not auto_taken and not answer.is_emulated
            mark = "  <- auto" if is_auto else ""
            auto_taken |= is_auto
            state = "emulated" if answer.is_emulated else "available"
            print(f"{info.name:<{width}}  {state:<9}  {answer.detail}  [{info.distribution}]{mark}")
        else:
            print(f"{info.name:<{width}}  refused    {answer}  [{info.distribution}]")
    if not infos:
        print("no backend is known; install one's package")


def _print_ops(config: EngineConfig) -> None:
    from octavo import LLM, SamplingParams

    with LLM(**engine_keywords(config)) as llm:
        llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=TRIAL_TOKENS, ignore_eos=True))
        _print_choices(llm.op_choices())


def _print_choices(choices: Iterable[OpChoice]) -> None:
    for choice in choices:
        calls = f"  {choice.calls} calls" if choice.calls else ""
        reason = f"  ({choice.reason})" if choice.reason else ""
        print(f"{choice.op:<18}{choice.implementation:<11}{_shown(choice.spec)}{reason}{calls}")


def _shown(spec: OpSpec) -> str:
    """A spec in one line: the axes that are set, those of a nested spec included."""
    words = []
    for item in dataclasses.fields(spec):
        value = getattr(spec, item.name)
        if dataclasses.is_dataclass(value):
            words.append(_shown(value))  # type: ignore[arg-type]
        elif value is True:
            words.append(item.name)
        elif value not in (None, False, "", "none", 0):
            words.append(f"{item.name}={str(value).removeprefix('torch.')}")
    return " ".join(words)
