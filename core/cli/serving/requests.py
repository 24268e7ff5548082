"""What `octavo bench serve` asks for, and when: requests from a seed or a file, and the moments of their arrival.

    random          each prompt of its own              ┐
    shared-prefix   groups of prompts that begin alike  ├── Ask, Ask, …   the same for the same seed
    FILE            ShareGPT, JSON lines, or token ids  ┘

Prompts are token ids that any vocabulary has, which leaves tokenisers out of the measuring; where a server wants texts
(chat, or --text), they are common words, one token each in most vocabularies; how many they were, the server tells.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.base.errors import ConfigError
from octavo.core.cli.bench_workload import HIGH_ID, LOW_ID

CHARS_PER_TOKEN = 4
"""For the length of a reply that a file gives as text: a rule of thumb for English."""

LENGTHS = ("new", "max_tokens", "output_tokens", "output_len")
"""Names under which files give the tokens of a reply."""

_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health
""".split()  # noqa: SIM905 - a list of them would be three times as long


class Ask(NamedTuple):
    """One request.

    Attributes:
        prompt: a text, or token ids.
        max_tokens: of the reply.
    """

    prompt: str | Sequence[int]
    max_tokens: int


class Shape(NamedTuple):
    """The lengths of generated requests, in tokens.

    Attributes:
        input_tokens, output_tokens: of each request; in shared-prefix, input_tokens come after the prefix.
        spread: lengths are drawn evenly between (1 - spread) and (1 + spread) times those.
        prefix_tokens, num_prefixes: of shared-prefix.
    """

    input_tokens: int
    output_tokens: int
    spread: float
    prefix_tokens: int
    num_prefixes: int


def generated(count: int, shape: Shape, seed: str, *, as_text: bool) -> list[Ask]:
    """Requests from a seed.

    Args:
        seed: another one gives requests that no cache knows from these.
    """
    rng = random.Random(seed)
    prefixes = [_tokens(rng, shape.prefix_tokens) for _ in range(shape.num_prefixes)] if shape.prefix_tokens else [[]]
    asks = []
    for _ in range(count):
        tokens = rng.choice(prefixes) + _tokens(rng, _drawn(rng, shape.input_tokens, shape.spread))
        asks.append(Ask(_text(tokens) if as_text else tokens, _drawn(rng, shape.output_tokens, shape.spread)))
    return asks


def read_asks(path: str, count: int, output_tokens: int | None, seed: str, *, as_text: bool) -> list[Ask]:
    """At most `count` requests of a file, drawn by the seed.

    Args:
        output_tokens: of every reply, in place of what the file says.

    Raises:
        ConfigError: the file is missing, of no known form, or has no request.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--workload {path}: {error.strerror}", field="workload") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--workload {path}: not a text file", field="workload") from None
    try:
        asks = [ask for item in _items(text) if (ask := _read_item(item, output_tokens)) is not None]
    except (KeyError, TypeError, ValueError):
        asks = []
    if not asks:
        raise ConfigError(
            f"--workload {path}: give a ShareGPT file, JSON lines with prompt and max_tokens, "
            "or an object of requests with prompt (token ids) and new (a count)",
            field="workload",
        )
    if as_text and not all(isinstance(ask.prompt, str) for ask in asks):
        raise ConfigError(f"--workload {path} has token ids; neither chat nor --text can send them", field="workload")
    rng = random.Random(seed)
    return asks if count >= len(asks) else rng.sample(asks, count)


def arrival_seconds(count: int, rate: float, seed: str, *, poisson: bool) -> list[float]:
    """When each request arrives, in seconds after the first.

    Args:
        rate: requests a second; infinite for all at once.
        poisson: gaps are drawn from an exponential distribution; otherwise all are alike.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.expovariate(rate) if poisson else 1 / rate for _ in range(count - 1)]
    return list(accumulate(gaps, initial=0.0))


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(LOW_ID, HIGH_ID) for _ in range(length)]


def _text(tokens: Sequence[int]) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)


def _drawn(rng: random.Random, length: int, spread: float) -> int:
    return max(1, rng.randint(math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))))


def _items(text: str) -> Iterator[Mapping[str, Any]]:
    """The requests of a file, whatever its form."""
    try:
        data = json.loads(text)
    except ValueError:
        data = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(data, dict):
        data = data.get("requests", [data])
    for item in data:
        if not isinstance(item, dict):
            raise TypeError
        yield item


def _read_item(item: Mapping[str, Any], output_tokens: int | None) -> Ask | None:
    """A request; None for a conversation without a question and an answer."""
    if "conversations" in item:
        turns = [turn["value"] for turn in item["conversations"][:2]]
        if len(turns) < 2 or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            return None
        prompt, wanted = turns[0], math.ceil(len(turns[1]) / CHARS_PER_TOKEN)
    else:
        prompt = item["prompt"] if isinstance(item["prompt"], str) else [int(token) for token in item["prompt"]]
        wanted = output_tokens or int(next((item[name] for name in LENGTHS if name in item), 0))
    if not prompt or wanted < 1:
        raise ValueError
    return Ask(prompt, output_tokens or wanted)
