"""Measure a server under load: latencies by percentile, throughput, goodput, and what the measuring cost.

Any server that speaks OpenAI's API will do. Requests come from a seed, with lengths to choose, or from a file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.core.base.errors import ConfigError, RequestFailed
from octavo.core.cli.client import Address, Client, add_client_flags, address_of
from octavo.core.cli.serving.figures import read_slos, report_of, row, summary
from octavo.core.cli.serving.load import Outcome, allow_connections, put_load
from octavo.core.cli.serving.probe import PATHS, Prober
from octavo.core.cli.serving.requests import Ask, Shape, arrival_seconds, generated, read_asks
from octavo.core.cli.serving.wire import target_of

GENERATED = ("random", "shared-prefix")
RECORDED = (
    "workload", "endpoint", "input_tokens", "output_tokens", "spread", "prefix_tokens", "num_prefixes", "seed",
    "arrivals", "max_concurrency", "warmup",
)  # fmt: skip
LEAST = {
    "num_prompts": 1, "input_tokens": 1, "output_tokens": 1, "prefix_tokens": 1, "num_prefixes": 1,
    "max_concurrency": 1, "warmup": 0, "seed": 0,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, the requests, the load, and what becomes of the figures."""
    add_client_flags(parser)
    add = parser.add_argument_group("requests").add_argument
    add("--workload", metavar="NAME|FILE", default="random", help="random, shared-prefix or a file (default: random)")
    add("--endpoint", metavar="|".join(PATHS), choices=tuple(PATHS), default="completions", help="default: completions")
    add("--num-prompts", metavar="N", type=int, default=100, help="requests to measure (default: 100)")
    add("--input-tokens", metavar="N", type=int, default=128, help="of a generated prompt (default: 128)")
    add("--output-tokens", metavar="N", type=int, help="of every reply (default: 128, or what the file says)")
    add("--spread", metavar="SHARE", type=float, default=0.0, help="draw lengths this share around those (default: 0)")
    add("--prefix-tokens", metavar="N", type=int, default=512, help="that a group shares (default: 512)")
    add("--num-prefixes", metavar="N", type=int, default=8, help="groups of shared-prefix (default: 8)")
    add("--text", action="store_true", help="send texts even where token ids would do")
    add("--seed", metavar="N", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")
    add("--body", metavar="JSON", default="{}", help="further fields of every request, such as '{\"top_k\": 5}'")
    add("--no-ignore-eos", action="store_true", help="let a reply end where the model ends it, as strict servers want")
    add = parser.add_argument_group("load").add_argument
    add("--request-rate", metavar="N", type=float, default=math.inf, help="arrivals a second (default: all at once)")
    add("--arrivals", metavar="poisson|constant", choices=("poisson", "constant"), default="poisson", help="the gaps")
    add("--max-concurrency", metavar="N", type=int, help="requests in flight at most (default: no limit)")
    add("--warmup", metavar="N", type=int, default=4, help="requests before the clock starts (default: 4)")
    add("--timeout", metavar="SECONDS", type=float, default=600.0, help="of one request (default: 600)")
    add = parser.add_argument_group("figures").add_argument
    add("--slo", metavar="NAME=MS", action="append", default=[], help="ttft, tpot or e2e, for goodput; may be repeated")
    add("--json", metavar="FILE", help="write the figures here")
    add("--details", action="store_true", help="with those of every single request")


def run(args: argparse.Namespace) -> int:
    """Measure, print and write. 1 when no request was answered."""
    _check(args)
    address, slos, fields = address_of(args), read_slos(args.slo), _fields(args)
    asks, warm = _asks(args)
    with Client(address) as client:
        model = client.model()
    allow_connections()
    arrivals = arrival_seconds(
        len(asks), args.request_rate, f"arrivals {args.seed}", poisson=args.arrivals == "poisson"
    )
    outcome = asyncio.run(_measure(args, address, model, fields, warm, asks, arrivals))
    report = {"url": address.url, "model": model, **_load(args, len(asks)), **report_of(outcome, slos)}
    print(f"{model} at {address.url}: {len(asks)} requests, {args.workload}")
    print(summary(report))
    if args.json:
        details = {"requests": [row(sample) for sample in outcome.samples]} if args.details else {}
        Path(args.json).write_text(json.dumps({**report, **details}, indent=1) + "\n", encoding="utf-8")
    return 0 if report["completed"] else 1


async def _measure(
    args: argparse.Namespace,
    address: Address,
    model: str,
    fields: dict[str, Any],
    warm: Sequence[Ask],
    asks: Sequence[Ask],
    arrivals: Sequence[float],
) -> Outcome:
    prober = Prober(target_of(address.url, address.headers), model, args.endpoint, fields, args.timeout)
    if warm:
        warmed = await put_load(prober, warm, [0.0] * len(warm), args.max_concurrency)
        if all(sample.error for sample in warmed.samples):
            raise RequestFailed(f"no request of the warm-up was answered ({warmed.samples[0].error})")
    return await put_load(prober, asks, arrivals, args.max_concurrency)


def _asks(args: argparse.Namespace) -> tuple[list[Ask], list[Ask]]:
    """What is measured, and as many others as warm up."""
    as_text = args.text or args.endpoint == "chat"
    if args.workload in GENERATED:
        prefix = args.prefix_tokens if args.workload == "shared-prefix" else 0
        shape = Shape(args.input_tokens, args.output_tokens or 128, args.spread, prefix, args.num_prefixes)
        asks = generated(args.num_prompts, shape, f"asks {args.seed}", as_text=as_text)
    else:
        asks = read_asks(args.workload, args.num_prompts, args.output_tokens, f"asks {args.seed}", as_text=as_text)
    shape = Shape(args.input_tokens, 8, 0.0, 0, 1)
    return asks, generated(args.warmup, shape, f"warm {args.seed}", as_text=as_text)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    try:
        more = json.loads(args.body)
    except ValueError:
        more = None
    if not isinstance(more, dict):
        raise ConfigError(f"--body is {args.body!r}; give a JSON object", field="body")
    ends = {} if args.no_ignore_eos else {"ignore_eos": True}
    return {"temperature": 0.0, **ends, **more}


def _load(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """What was asked, as JSON takes it."""
    rate = None if math.isinf(args.request_rate) else args.request_rate
    return {"load": {"num_prompts": count, "request_rate": rate, **{name: getattr(args, name) for name in RECORDED}}}


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for a number out of range."""
    for name, low in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give at least {low}", field=name)
    for name in ("request_rate", "timeout"):
        if not getattr(args, name) > 0:  # NaN is not, either
            value = getattr(args, name)
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give a number above 0", field=name)
    if not 0 <= args.spread <= 1:
        raise ConfigError(f"--spread is {args.spread}; give a number between 0 and 1", field="spread")
