"""Measure throughput (all requests at once) or latency (one after another), optionally beside other engines.

Each --peer NAME=COMMAND is started once and serves the same workload in turn with Octavo; the JSON file records every
run, the medians, and the ratio to each peer within the same turn.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.base.config import EngineConfig
from octavo.core.base.errors import ConfigError
from octavo.core.base.host import usable_cores
from octavo.core.cli.bench_peer import Peer, peer_command
from octavo.core.cli.bench_workload import Workload, default_workload, read_workload
from octavo.core.cli.flags import add_config_flags, add_model, engine_config, engine_keywords

if TYPE_CHECKING:
    from octavo import LLM, SamplingParams

Result = dict[str, Any]

WARM_PROMPT_TOKENS, WARM_NEW_TOKENS = 32, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The mode, MODEL, what to serve and beside whom, and every setting of the engine."""
    parser.add_argument("mode", metavar="throughput|latency", choices=("throughput", "latency"), help="what to measure")
    add_model(parser, required=False)
    parser.add_argument("--workload", metavar="FILE", help="requests as token ids (default: a small seeded set)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="turns to measure (default: 3)")
    parser.add_argument(
        "--peer",
        metavar="NAME=COMMAND",
        action="append",
        default=[],
        help="another engine to compare with; may be repeated",
    )
    add_config_flags(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    """Measure, print one line per turn and a summary, and write the JSON file."""
    config = engine_config(args)
    if args.repeats < 1:
        raise ConfigError(f"--repeats is {args.repeats}; give at least 1", field="repeats")
    if args.peer and not args.workload:
        raise ConfigError("--peer needs --workload FILE, so that both sides serve the same requests", field="peer")
    workload = read_workload(args.workload) if args.workload else default_workload(args.mode)
    if not hasattr(args, "max_num_seqs"):
        config = dataclasses.replace(config, max_num_seqs=workload.max_seqs)
    if config.max_model_len is None:
        longest = max(workload.longest_tokens, WARM_PROMPT_TOKENS + WARM_NEW_TOKENS)
        config = dataclasses.replace(config, max_model_len=longest)
    report = _measure(config, workload, args)
    print(_summary(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(config: EngineConfig, workload: Workload, args: argparse.Namespace) -> Result:
    from octavo import LLM, SamplingParams, __version__

    serve = _throughput if args.mode == "throughput" else _latency
    params = [SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True) for new in workload.new_tokens]
    with contextlib.ExitStack() as stack:
        started = time.perf_counter()
        llm = stack.enter_context(LLM(**engine_keywords(config)))
        load_seconds = time.perf_counter() - started
        peers = [stack.enter_context(Peer(*peer_command(text), [args.workload])) for text in args.peer]
        warm = SamplingParams(temperature=0.0, max_tokens=WARM_NEW_TOKENS, ignore_eos=True)
        llm.generate([[100] * WARM_PROMPT_TOKENS], warm)
        runs: list[Result] = []
        peer_runs: dict[str, list[Result]] = {peer.name: [] for peer in peers}
        for number in range(args.repeats):
            runs.append(serve(llm, workload.turn(number), params))
            print(f"turn {number}: octavo {_line(runs[-1])}", flush=True)
            for peer in peers:
                peer_runs[peer.name].append(peer.serve(workload.name))
                print(f"turn {number}: {peer.name} {_line(peer_runs[peer.name][-1])}", flush=True)
    return {
        "mode": args.mode,
        "workload": workload.name,
        "engine": f"octavo {__version__}",
        "host": {"machine": platform.machine(), "cores": usable_cores(), "python": platform.python_version()},
        "settings": {key: value for key, value in engine_keywords(config).items() if value is not None},
        "load_seconds": round(load_seconds, 3),
        "runs": runs,
        "median": _median(runs),
        "peers": {name: _against(runs, theirs) for name, theirs in peer_runs.items()},
    }


def _throughput(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Result:
    """All requests at once."""
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    tokens_in = sum(map(len, prompts))
    tokens_out = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": round(seconds, 4),
        "in_tokens": tokens_in,
        "out_tokens": tokens_out,
        "out_tps": round(tokens_out / seconds, 2),
        "total_tps": round((tokens_in + tokens_out) / seconds, 2),
    }


def _latency(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> Result:
    """One request after another, each token timed."""
    begun, firsts, gaps, rates = time.perf_counter(), [], [], []
    tokens_out = 0
    for prompt, wanted in zip(prompts, params, strict=True):
        started = time.perf_counter()
        times = [
            time.perf_counter() for piece in llm.generate_stream(prompt, wanted) for _ in piece.outputs[0].token_ids
        ]
        tokens_out += len(times)
        firsts.append(times[0] - started)
        gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
        if len(times) > 1:
            rates.append((len(times) - 1) / (times[-1] - times[0]))
    seconds = time.perf_counter() - begun
    return {
        "seconds": round(seconds, 4),
        "out_tokens": tokens_out,
        "out_tps": round(tokens_out / seconds, 2),
        "ttft_p50": round(statistics.median(firsts), 4),
        "itl_p50": round(statistics.median(gaps), 5) if gaps else None,
        "itl_p99": round(sorted(gaps)[int(0.99 * (len(gaps) - 1))], 5) if gaps else None,
        "decode_tps": round(statistics.median(rates), 2) if rates else None,
    }


def _median(runs: list[Result]) -> Result:
    keys = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    return {key: statistics.median(result[key] for result in runs) for key in keys}


def _against(ours: list[Result], theirs: list[Result]) -> Result:
    """A peer's runs, and how many times its speed is ours: the median of the turns' ratios, and their range."""
    report: Result = {"runs": theirs}
    for key in ("out_tps", "decode_tps"):
        ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True) if a.get(key) and b.get(key)]
        if ratios:
            report[f"{key}_ratio"] = round(statistics.median(ratios), 3)
            report[f"{key}_ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return report


def _line(result: Result) -> str:
    shown = ("seconds", "out_tps", "ttft_p50", "itl_p50", "decode_tps")
    return "  ".join(f"{key} {result[key]}" for key in shown if result.get(key) is not None)


def _summary(report: Result) -> str:
    lines = [f"{report['workload']}, median of {len(report['runs'])}: {_line(report['median'])}"]
    for name, peer in report["peers"].items():
        ratios = ", ".join(f"{key.removesuffix('_ratio')} x {peer[key]}" for key in peer if key.endswith("_ratio"))
        lines.append(f"against {name}: {ratios}")
    return "\n".join(lines)
