"""The flags that say how to choose the next token, shared by the commands that generate text."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.core.base.options import Kind, Option
from octavo.core.base.params import SamplingParams

_FLAGS: tuple[tuple[str, Kind, str], ...] = (
    ("max_tokens", Kind.INT, "the most tokens of the reply"),
    ("temperature", Kind.FLOAT, "0 always takes the likeliest token; higher is more varied"),
    ("top_k", Kind.INT, "choose among the K likeliest tokens; 0 among all"),
    ("top_p", Kind.FLOAT, "choose among the likeliest tokens that make up this probability"),
    ("min_p", Kind.FLOAT, "drop tokens below this share of the likeliest one's probability"),
    ("repetition_penalty", Kind.FLOAT, "above 1 discourages tokens of prompt and reply"),
    ("presence_penalty", Kind.FLOAT, "above 0 discourages tokens that the reply has"),
    ("frequency_penalty", Kind.FLOAT, "above 0 discourages tokens by how often the reply has them"),
    ("seed", Kind.INT, "makes a sampled reply repeatable"),
)
_PREFIX = "sampling_"  # so that --seed here and the engine's `seed` do not meet


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add a flag per sampling parameter; `defaults` replace those of SamplingParams."""
    base = SamplingParams(**defaults)
    _add_flags(parser, {name: getattr(base, name) for name, _, _ in _FLAGS})
    parser.set_defaults(sampling_defaults=defaults)


def add_sampling_fields(parser: argparse.ArgumentParser) -> None:
    """Add the same flags for a request to a server, whose defaults are its own."""
    _add_flags(parser, {})


def _add_flags(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    group = parser.add_argument_group("sampling")
    for name, _, text in _FLAGS:
        shown = text if defaults.get(name) is None else f"{text} (default: {defaults[name]})"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, dest=_PREFIX + name, metavar="N", default=argparse.SUPPRESS, help=shown)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's own end")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The parameters that the flags ask for.

    Raises:
        UserError: a value that is no number or out of range.
    """
    given = {**args.sampling_defaults, **_numbers(args)}
    return SamplingParams(**given, stop=tuple(args.stop), ignore_eos=args.ignore_eos)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request's body that the flags ask for; what was not given is left to the server.

    Raises:
        UserError: a value that is no number or out of range.
    """
    given = _numbers(args)
    if args.stop:
        given["stop"] = args.stop
    if args.ignore_eos:
        given["ignore_eos"] = True
    SamplingParams(**given)  # told here, before anybody is asked
    return given


def _numbers(args: argparse.Namespace) -> dict[str, Any]:
    """The numbers that were given, by their names."""
    return {
        name: _option(name, kind, text).convert(getattr(args, _PREFIX + name), "--" + name.replace("_", "-"))
        for name, kind, text in _FLAGS
        if hasattr(args, _PREFIX + name)
    }


def _option(name: str, kind: Kind, text: str) -> Option:
    """An Option that reads the flag's number; ranges are SamplingParams' own."""
    inf = float("inf")
    return Option(
        name=name, kind=kind, default=None, help=text, choices=(), low=-inf, high=inf, optional=False, flag="--" + name
    )
