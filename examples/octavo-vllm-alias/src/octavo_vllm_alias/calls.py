"""vLLM's commands as Octavo's: which table reads their flags, and what they mean together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from octavo_vllm_alias.table import load_table
from octavo_vllm_alias.translate import TRUE, BadCall, Call, Given, read, take

EVERYWHERE = "0.0.0.0"
"""Where vLLM listens when it is not told."""


def serve(words: Sequence[str], environ: Mapping[str, str]) -> Call:
    """`vllm serve`, and `python -m vllm.entrypoints.openai.api_server`.

    Raises:
        BadCall: it can't be translated.
    """
    plain, given = read(words, load_table().by_name())
    call = Call(["serve"])
    _take_model(plain, given, call)
    take(given.values(), call)
    if "--host" not in given:
        call.words.append(f"--host={EVERYWHERE}")
    if environ.get("VLLM_API_KEY") and "--api-key" not in given and "OCTAVO_API_KEY" not in environ:
        call.variables["OCTAVO_API_KEY"] = environ["VLLM_API_KEY"]
    if environ.get("VLLM_LOGGING_LEVEL") and "--log-level" not in given and "OCTAVO_LOG_LEVEL" not in environ:
        call.variables["OCTAVO_LOG_LEVEL"] = environ["VLLM_LOGGING_LEVEL"].lower()
    if environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in TRUE:
        call.variables["OCTAVO_ALLOW_LORA_UPDATES"] = "true"
    return call


def run_batch(words: Sequence[str], _: Mapping[str, str]) -> Call:
    """`vllm run-batch`: the flags of the engine, and the files."""
    own = load_table("batch").by_name()
    plain, given = read(words, load_table().by_name() | own)
    call = Call(["run-batch"])
    _take_model(plain, given, call)
    take(given.values(), call)
    return call


def chat(words: Sequence[str], _: Mapping[str, str]) -> Call:
    """`vllm chat`."""
    return _client("chat", words)


def complete(words: Sequence[str], _: Mapping[str, str]) -> Call:
    """`vllm complete`."""
    return _client("complete", words)


def bench_serve(words: Sequence[str], _: Mapping[str, str]) -> Call:
    """`vllm bench serve`."""
    plain, given = read(words, load_table("bench").by_name())
    if plain:
        raise BadCall(f"unexpected argument {plain[0]!r}")
    body = given.pop("--extra-body", None)
    sampling = {name: given.pop(name).values[0] for name in list(given) if given[name].flag.to == "BODY"}
    call = Call(["bench", "serve"])
    take(given.values(), call)
    parts, call.variables = call.variables, {}
    if "HOST" in parts or "PORT" in parts:
        call.words.append(f"--url=http://{parts.get('HOST', '127.0.0.1')}:{parts.get('PORT', '8000')}")
    if "SERVED" in parts or "MODEL" in parts:
        call.words.append(f"--model={parts.get('SERVED') or parts['MODEL']}")
    endpoint = parts.get("ENDPOINT") or parts.get("BACKEND")
    if endpoint is not None:
        call.words.append(f"--endpoint={endpoint}")
    call.words.append(f"--workload={_workload(parts)}")
    if parts.get("IGNORE_EOS") != "true":
        call.words.append("--no-ignore-eos")
    fields = {name.removeprefix("--").replace("-", "_"): _number(value) for name, value in sampling.items()}
    if fields or body:
        call.words.append(f"--body={json.dumps(fields | (_object(body.values[0]) if body else {}))}")
    if parts.get("SAVE") == "true":
        name = parts.get("FILE") or f"bench-{datetime.now():%Y%m%d-%H%M%S}.json"
        call.words.append(f"--json={Path(parts.get('DIR', '.'), name)}")
    return call


COMMANDS: Mapping[tuple[str, ...], Callable[[Sequence[str], Mapping[str, str]], Call]] = {
    ("serve",): serve,
    ("chat",): chat,
    ("complete",): complete,
    ("bench", "serve"): bench_serve,
    ("run-batch",): run_batch,
}


def _take_model(plain: Sequence[str], given: dict[str, Given], call: Call) -> None:
    named = given.pop("--model", None)
    if len(plain) > 1:
        raise BadCall(f"unexpected argument {plain[1]!r}; the model is {plain[0]!r} already")
    if plain or named:
        call.words.append(plain[0] if plain else named.values[0])  # type: ignore[union-attr]


def _client(command: str, words: Sequence[str]) -> Call:
    plain, given = read(words, load_table("chat").by_name())
    if plain:
        raise BadCall(f"unexpected argument {plain[0]!r}; a single prompt follows --quick")
    call = Call([command])
    take(given.values(), call)
    if "PROMPT" in call.variables:
        call.words.append(call.variables.pop("PROMPT"))
    return call


def _workload(parts: Mapping[str, str]) -> str:
    name = parts.get("DATASET", "random")
    if name in ("sharegpt", "custom"):
        if "PATH" not in parts:
            raise BadCall(f"--dataset-name {name} needs --dataset-path, a file")
        return parts["PATH"]
    if name not in ("random", "shared-prefix"):
        raise BadCall(f"--dataset-name {name} is refused; it may be random, prefix_repetition, sharegpt or custom")
    return name


def _number(text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise BadCall(f"{text!r} is no number") from None


def _object(text: str) -> dict[str, object]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise BadCall(f"--extra-body is {text!r}; give a JSON object")
    return found
